#!/usr/bin/env bash
# Creates .venv (or reuses it) and installs hf_longctx with the extras named as arguments:  bash scripts/setup.sh demo test
# torch comes first and through the constraints file, so that no other package pulls in a build for another device.
# What this machine lacks is said in one line. Nothing here needs root, or git. PYTHON says which Python to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$(pwd -P)
log=.venv/install.log
disk_mib=${DISK_MIB:-2500} # .venv with all extras takes 2.3 GB, with `demo` alone 1.6 GB, where torch is a build for CPUs

stop() {
    echo "setup: $1" >&2
    exit 1
}

# What keeps a Python from making the environment, in words; nothing where nothing does.
unfit() {
    command -v "$1" >/dev/null || { echo "there is no $1"; return; }
    "$1" -I -c '
import importlib.util, sys
version = "%d.%d" % sys.version_info[:2]
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    print(sys.argv[1], "is Python", version)
elif not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    print(sys.argv[1], "has no venv (on Debian and Ubuntu: apt install python%s-venv)" % version)
' "$1" 2>/dev/null || echo "$1 does not start"
}

# What is wrong with .venv, in words; nothing where nothing is.
broken() {
    [ -x .venv/bin/python ] || { echo "it has no Python that can be started"; return; }
    [ ! -e .venv/unfinished ] || { echo "its installation was interrupted"; return; }
    .venv/bin/python -I -c '
import importlib.util, pathlib, sys
made = pathlib.Path(sys.argv[1], "bin")
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    print("its Python is %d.%d, and 3.11 or 3.12 is needed" % sys.version_info[:2])
elif importlib.util.find_spec("pip") is None:
    print("it has no pip, or that of another Python")
elif (made / "pip").is_file() and str(made) not in (made / "pip").read_text():
    print("it was made in another folder")
' "$here/.venv" 2>/dev/null || echo "its Python does not start"
}

make_environment() {
    local candidates=(python3 python3.12 python3.11) reasons="" name reason free_mib
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for name in "${candidates[@]}"; do
        reason=$(unfit "$name")
        [ -n "$reason" ] || break
        reasons+="${reasons:+; }$reason"
    done
    [ -z "$reason" ] || stop "Python 3.11 or 3.12 with venv is needed, and $reasons. Install one, or set PYTHON=/path/to/python3.11"
    free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$disk_mib" ] || stop "$disk_mib MiB of disk are needed in $here, and $free_mib are free: make room"
    "$name" -m venv .venv || stop "$name -m venv .venv failed, as it says above"
    touch .venv/unfinished
}

# Runs a command whose words go to the log. Meanwhile a terminal shows what is done and for how long; then one line says it.
step() {
    local what=$1 began=$SECONDS code=0
    shift
    "$@" >>"$log" 2>&1 &
    local job=$!
    trap 'kill $job 2>/dev/null; echo >&2; exit 130' INT TERM
    if [ -t 2 ]; then
        while kill -0 $job 2>/dev/null; do
            printf '\r%s: %d s' "$what" $((SECONDS - began)) >&2
            sleep 0.2
        done
        printf '\r\033[K' >&2
    fi
    wait $job || code=$?
    trap - INT TERM
    [ $code = 0 ] || explain "$what"
    echo "$what: done in $((SECONDS - began)) s"
}

# Why pip failed: one line where that is known, else the end of its log.
explain() {
    if grep -q "No space left on device" "$log"; then
        stop "$1 failed: no space is left on a disk (of $here, of ${TMPDIR:-/tmp}, or of pip's cache): make room"
    elif grep -qE "NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|NameResolutionError|SSLError" "$log"; then
        stop "$1 failed: no package index could be reached. Connect to a network, or say where a mirror is: pip config set global.index-url URL"
    fi
    tail -n 15 "$log" >&2
    stop "$1 failed, as the end of $here/$log says above"
}

if [ -e .venv ] || [ -L .venv ]; then
    reason=$(broken)
    if [ -n "$reason" ]; then
        if [ -d .venv ] && { [ -e .venv/pyvenv.cfg ] || [ -d .venv/bin ] || [ -z "$(ls -A .venv)" ]; } || [ -L .venv ]; then
            echo "setup: .venv is made again: $reason"
            rm -rf .venv
        else
            stop "$here/.venv is no environment of Python: move it away"
        fi
    fi
fi
[ -e .venv ] || make_environment

# An extra is installed once for each state of the requirements; a stamp file remembers it.
extras=$(IFS=,; echo "$*")
state=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | sha256sum | cut -c1-16)
stamps=(".venv/installed-$state")
for extra in "$@"; do stamps+=(".venv/installed-$state-$extra"); done
for stamp in "${stamps[@]}"; do
    if [ ! -e "$stamp" ]; then
        : >"$log"
        pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install --progress-bar off --retries 2)
        echo "Installing into .venv, once: about 2 minutes where the network is quick"
        step "torch" "${pip[@]}" --constraint scripts/constraints.txt torch
        step "hf_longctx${extras:+[$extras]} and what it needs" \
            "${pip[@]}" --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
        touch "${stamps[@]}"
        rm -f .venv/unfinished
        break
    fi
done
