#!/usr/bin/env bash
# pythons.sh: run the tests that need no broker on every Python from 3.11 on that is found here, and on those of Debian
# sid in a container. All of them run, even if an earlier one has failed. At the end, print the result of each.
#
# The script finds pyenv's versions and python3.N on the PATH, and uses one of each minor version. It creates a virtual
# environment for each in .pythons.
#
# Settings (environment):
#   PYTHONS  the versions to use, such as "3.12 sid", instead of all
#   JOBS     processes per run (default 4)
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit
trap 'exit 130' INT
trap 'exit 143' TERM

main() {
    local status=0 report='' name began outcome
    found
    for name in ${PYTHONS:-$(printf '%s\n' "${!PYTHON_OF[@]}" | sort -V)}; do
        printf '\n== Python %s\n' "$name"
        began=$SECONDS outcome=passed
        run_on "$name" || { outcome=FAILED status=1; }
        report+=$(printf 'Python %-6s %s, %d s' "$name" "$outcome" $((SECONDS - began)))$'\n'
    done
    printf '\n%s' "$report"
    return "$status"
}

declare -A PYTHON_OF=([sid]='')  # name -> interpreter

found() {
    local python name
    for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python $(compgen -c python3. | sort -u); do
        [[ $python == */* || $python =~ ^python3\.[0-9]+$ ]] || continue
        name=$("$python" -c 'import ensurepip, sys; v = sys.version_info; print(f"3.{v.minor}" * (v >= (3, 11)))' 2>/dev/null)
        [ -n "$name" ] && [ -z "${PYTHON_OF[$name]:-}" ] && PYTHON_OF[$name]=$python
    done
}

run_on() {
    local name=$1 in_place=() python pythons status=0
    if [ "$name" = sid ]; then
        in_container || return
        pythons=$("${in_place[@]}" sh -c 'cd /usr/bin && printf "%s\n" python3.* | grep -x "python3\.[0-9]*" | sort -V') || return
        for python in $pythons; do
            run_tests "$ROOT/.pythons/sid-$python" || status=1
        done
        return "$status"
    fi
    python=${PYTHON_OF[$name]:-}
    [ -n "$python" ] || { echo "there is no Python $name here"; return 1; }
    run_tests "$ROOT/.pythons/$name"
}

run_tests() {  # with $python, in its virtual environment
    local venv=$1
    install || return
    "${in_place[@]}" "$venv/bin/python" -VV
    PYTHONPATH=$ROOT "${in_place[@]}" "$venv/bin/python" -m pytest tests -q -n "${JOBS:-4}" -p no:cacheprovider
}

install() {  # into $venv, unless it is already done
    local want
    want=$(sha256sum <pyproject.toml)\ $("${in_place[@]}" "$python" -VV)
    [ "$(cat "$venv/.installed" 2>/dev/null)" = "$want" ] && return
    "${in_place[@]}" "$python" -m venv --clear "$venv" &&
        "${in_place[@]}" "$venv/bin/python" -m pip install -qq --editable '.[all,bench,unit]' &&
        printf '%s\n' "$want" >"$venv/.installed"
}

in_container() {  # sets in_place, the prefix of commands that run in this directory, with this machine's registries
    local image variable
    image=$(integration/setup.sh python) || return
    in_place=(docker run --rm --init --network host --user "$(id -u):$(id -g)" --env HOME=/tmp --env PYTHONPATH
        --volume "$ROOT:$ROOT" --workdir "$ROOT")
    for variable in $(compgen -e | grep -E '^PIP_|^(https?|no)_proxy$|^(HTTPS?|NO)_PROXY$'); do
        in_place+=(--env "$variable")
    done
    for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
        [ ! -e "$file" ] || in_place+=(--volume "$(realpath "$file"):$file:ro")
    done
    in_place+=("$image" nice -n "$(nice)")
}

main
