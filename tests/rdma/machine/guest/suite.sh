#!/bin/bash
# All that is tested in the emulated machine, in the order in which a fault is best understood. It is one session,
# because importing torch takes long here; it ends where the devices themselves do not work. The contract's slow
# tests move more than Soft-RoCE can in a few minutes.
# Reading torch's libraries takes as long as running their start, and a second processor has nothing to do yet.
cat "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/torch/lib/*.so > /dev/null &
exec "$PYTHON" -m pytest -v --color=no --tb=short --durations=8 --timeout=240 -p no:cacheprovider -p no:xdist -p no:anyio \
    -o console_output_style=classic -o junit_suite_name=rdma --junitxml="$HETERO_TEST_OUT/rdma.xml" \
    -m "not slow" -k "verbs or rdma" tests/rdma/test_smoke.py \
    tests/hetero/link/test_contract.py tests/hetero/link/test_contract_failures.py \
    tests/rdma/test_contract_over_verbs.py tests/rdma/test_pyverbs_peer.py tests/rdma/test_faults.py \
    tests/rdma/test_bandwidth.py tests/rdma/test_training.py
