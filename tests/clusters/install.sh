#!/bin/bash
# Install the launchers that tests/clusters runs: OpenMPI, SLURM with munge, and iproute2 for network namespaces.
# Where it cannot, it says so in one sentence and succeeds; the tests then skip the part that is missing.

set -u
log=$(mktemp --suffix=.install-clusters)
missing=()
for pair in mpirun:openmpi-bin slurmd:slurm-wlm munged:munge ip:iproute2; do
    PATH=$PATH:/usr/sbin command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} -eq 0 ] && rm "$log" && exit 0
if ! command -v apt-get > /dev/null; then
    echo "not installed: ${missing[*]}: this is no Debian, so install them by hand"
elif [ "$(id -u)" != 0 ]; then
    echo "not installed: ${missing[*]}: run as root, or install them with apt-get"
elif ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
        > "$log" 2>&1; then
    echo "not installed: ${missing[*]}: apt-get failed, $log says why"
fi
exit 0
