#!/bin/bash
# Two "hosts" a and b with two rails each, in one network namespace, because Soft-RoCE knows no other:
#
#     a0 10.1.0.1 --veth-- 10.1.0.2 b0        RDMA devices rxa0, rxb0
#     a1 10.2.0.1 --veth-- 10.2.0.2 b1        RDMA devices rxa1, rxb1
#
# Both addresses of a wire are this machine's own, and it would keep their packets to itself. So routes that
# depend on the source are looked up before the table of its own addresses, and packets from itself are let in.
#
#     network.sh             makes all of it
#     network.sh mend RAIL   brings a rail up again after a fault, with the routes that Linux has dropped
set -eu

route() {
    # A packet from address $1 to $2 leaves by $3 for the neighbour $4; $5 is a table of its own.
    ip route replace "$2" dev "$3" src "$1" table "$5"
    ip neigh replace "$2" lladdr "$(cat "/sys/class/net/$4/address")" dev "$3" nud permanent
}

mend() {
    local rail=$1 net=10.$(($1 + 1)).0
    ip link set "a$rail" up
    ip link set "b$rail" up
    route "$net.1" "$net.2" "a$rail" "b$rail" $((100 + rail))
    route "$net.2" "$net.1" "b$rail" "a$rail" $((200 + rail))
}

make() {
    local rail=$1 net=10.$(($1 + 1)).0 side
    ip link add "a$rail" type veth peer name "b$rail"
    for side in a b; do
        echo 0 > "/proc/sys/net/ipv4/conf/$side$rail/rp_filter"
        echo 1 > "/proc/sys/net/ipv4/conf/$side$rail/accept_local"
        # 4096 bytes of content and RoCE's headers in one packet.
        ip link set "$side$rail" mtu 4200
    done
    ip address add "$net.1/24" dev "a$rail"
    ip address add "$net.2/24" dev "b$rail"
    ip rule add pref 10 iif lo from "$net.1" to "$net.2" lookup $((100 + rail))
    ip rule add pref 10 iif lo from "$net.2" to "$net.1" lookup $((200 + rail))
    mend "$rail"
    rdma link add "rxa$rail" type rxe netdev "a$rail"
    rdma link add "rxb$rail" type rxe netdev "b$rail"
}

if [ "${1:-}" = mend ]; then
    mend "$2"
    exit
fi
for key in rp_filter:0 accept_local:1 arp_ignore:1; do
    echo "${key#*:}" > "/proc/sys/net/ipv4/conf/all/${key%:*}"
done
ip link set lo up
ip rule add pref 100 lookup local
ip rule del pref 0
make 0
make 1
