#!/usr/bin/env bash
# A Ray of several machines for `longctx.loader: ray`, without a dashboard and without usage statistics:
#     bash scripts/ray_cluster.sh head 10.0.0.1            # on the first machine: the address by which others reach it
#     bash scripts/ray_cluster.sh join 10.0.0.1            # on each of the others
#     bash scripts/torchrun.sh my.yaml longctx.loader=ray longctx.ray_address=10.0.0.1:6379 longctx.ray_servers=4
#     bash scripts/ray_cluster.sh stop                     # on each machine, when done: ends every Ray of yours there
# Ray asks all who come for a token, which the first machine writes to ~/.ray/auth_token: the others need that file. Every
# machine must see the prepared data. One machine needs none of this: without ray_address, training starts a Ray of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v ray >/dev/null || export PATH="$PWD/.venv/bin:$PATH"
port=${PORT:-6379} store=${STORE_BYTES:-1073741824}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
export RAY_worker_niceness=0  # Ray's own 15 lets ranks that compute starve the actors they wait for
case "${1:-}${2:+ address}" in
    "head address")
        ray get-auth-token --generate >/dev/null || { echo "this Ray has no tokens: pip install 'ray>=2.52'" >&2; exit 2; }
        exec ray start --head --node-ip-address "$2" --port "$port" --include-dashboard=false --object-store-memory "$store" ;;
    "join address")
        exec ray start --address "$2:$port" --object-store-memory "$store" ;;
    stop)
        exec ray stop ;;
    *)
        sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}" >&2
        exit 2 ;;
esac
