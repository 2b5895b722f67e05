#!/bin/bash
# All that is tested in the emulated machine, in the order in which a fault is best understood.
set -u
status=0

part() {
    # $1 names the part and its JUnit file, the rest goes to pytest.
    local name=$1
    shift
    echo "=== $name (at $(cut -d' ' -f1 /proc/uptime) s)"
    "$PYTHON" -m pytest -v --color=no --tb=short --durations=8 --timeout=240 \
        -p no:cacheprovider -o console_output_style=classic -o junit_suite_name="rdma $name" \
        --junitxml="$HETERO_TEST_OUT/$name.xml" "$@"
    local code=$?
    [ $code = 0 ] || { echo "=== $name FAILED with exit code $code"; status=1; }
}

part smoke tests/rdma/test_smoke.py
# Without devices that work, the rest would only say the same thing again.
[ $status = 0 ] || exit $status

# One session, because importing torch takes long here. The contract's slow tests move more than Soft-RoCE can in
# a few minutes.
part links -m "not slow" -k "verbs or rdma" \
    tests/hetero/link/test_contract.py tests/hetero/link/test_contract_failures.py \
    tests/rdma/test_contract_over_verbs.py tests/rdma/test_read_back.py tests/rdma/test_faults.py tests/rdma/test_bandwidth.py tests/rdma/test_training.py
exit $status
