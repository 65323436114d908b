#!/usr/bin/env bash
# parts.sh TARGET...: make every target, whatever became of those before it. At the end tell what became of each, and
# exit with 1 if one failed. Of ONE+OTHER both run at the same time; what OTHER prints comes when both have ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
directory=$(mktemp -d) || exit
trap 'rm -rf "$directory"' EXIT
trap 'exit 130' INT
trap 'jobs -p | xargs -r kill; exit 143' TERM

status=0
run() {
    local began=$SECONDS outcome=passed
    "${MAKE:-make}" --no-print-directory "$1" || outcome=FAILED
    printf '%-18s %s, %d s\n' "$1" "$outcome" $((SECONDS - began)) >"$directory/$1.outcome"
    [ "$outcome" = passed ]
}

for together in "$@"; do
    first=${together%%+*} others=()
    for target in $(tr + ' ' <<<"${together#"$first"}"); do
        run "$target" >"$directory/$target.output" 2>&1 &
        others+=("$target:$!")
    done
    run "$first" || status=1
    for other in "${others[@]}"; do
        wait "${other#*:}" || status=1
        cat "$directory/${other%:*}.output"
    done
done
echo
for target in $(tr + ' ' <<<"$*"); do cat "$directory/$target.outcome"; done
exit "$status"
