#!/usr/bin/env bash
# Sets up everything that the Makefile needs beyond this repository. Idempotent: parts that exist are used unchanged.
#
#   setup.sh venv              .venv with this package (editable) and all its extras
#   setup.sh compiled          the bytecode of the tests
#   setup.sh docker            a docker daemon that answers
#   setup.sh image newest|4.0  the broker image reliable-mq/rabbitmq:newest or :4.0
#   setup.sh databases         the images reliable-mq/databases:latest, with Redis, PostgreSQL and MariaDB, and :mysql
#   setup.sh python            an image with the newest Python of Debian sid; prints its name
#   setup.sh java              Java for Spark (17 or newer), and .venv/spark, which lets Spark start faster
#   setup.sh faketime          libfaketime, for programs whose wall clock jumps; prints the path of the library
#   setup.sh strace            strace, to trace when a program syncs files to the disk
#   setup.sh chromium          Chromium, for the tests of the web page
#   setup.sh prometheus        Prometheus and promtool, for the alerts and dashboards
#   setup.sh all               all of the above, both broker images
#
# Settings (environment):
#   RELIABLE_MQ_BROKER_IMAGE     RabbitMQ image to use for `newest`, e.g. rabbitmq:4-management
#   RELIABLE_MQ_BROKER_IMAGE_40  the same for `4.0`, e.g. rabbitmq:4.0-management
#   RELIABLE_MQ_DATABASES_IMAGE  image with Debian's redis-server, postgresql and mariadb-server, for `databases`
#   RELIABLE_MQ_MYSQL_IMAGE      image with MySQL's server, for `databases`
#   PYTHON                       interpreter for .venv (default python3; 3.11 or newer)
#
# Without a setting, the script uses the first image that is available: a local official image; an official image from
# the docker daemon's registry; an image built from Debian's packages with debootstrap, through apt's mirror and proxy.
# Missing programs are installed with apt-get, only as root on Debian or a derivative. Elsewhere the script says what is
# missing and exits with 69 (EX_UNAVAILABLE).
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$HERE")
RECIPE_DIR=$HERE/broker
DAEMON_LOG=/var/log/reliable-mq-dockerd.log
DAEMON_DEADLINE=60      # seconds until a started daemon must answer
PULL_DEADLINE=300       # seconds for one image from a registry
DEBIAN_PACKAGES=rabbitmq-server,ca-certificates
DATABASES_DIR=$HERE/databases
DATABASE_PACKAGES=redis-server,postgresql,mariadb-server
MYSQL_PACKAGES=mysql-server-core  # only in Debian sid
PYTHON_PACKAGES=python3-all-venv,ca-certificates

main() {
    case "${1:-}" in
        venv) ensure_venv ;;
        compiled) ensure_compiled ;;
        docker) ensure_docker ;;
        image) ensure_docker; ensure_image "${2:?newest or 4.0}" ;;
        databases) ensure_docker; ensure_databases ;;
        python) ensure_docker; ensure_python ;;
        java) ensure_java ;;
        faketime) ensure_faketime ;;
        strace) ensure_strace ;;
        chromium) ensure_chromium ;;
        prometheus) ensure_prometheus ;;
        all) ensure_venv; ensure_docker; ensure_image newest; ensure_image 4.0; ensure_databases; ensure_java; ensure_faketime >/dev/null; ensure_strace; ensure_prometheus; ensure_chromium ;;
        *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 64 ;;
    esac
}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 69; }
can_apt() { [ "$(id -u)" -eq 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }

apt_install() {  # apt_install WHAT-FOR PACKAGE...
    local purpose=$1; shift
    can_apt || die "$purpose needs $*: install that, or run this as root on Debian or a derivative."
    say "installing $* ($purpose)"
    apt-get update -q >&2 || say "apt-get update failed; going on with the lists that are there"
    # Parallel tests may each install something, so wait for the lock.
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -q -y --no-install-recommends "$@" >&2 </dev/null
}

# -- virtual environment ---------------------------------------------------------------------------------------------

ensure_venv() {
    local python=${PYTHON:-python3} stamp=$ROOT/.venv/.installed want
    want=$(sha256sum <"$ROOT/pyproject.toml")
    [ -x "$ROOT/.venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install 'the virtual environment' python3 python3-venv
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$python is older than 3.11: set PYTHON to a newer interpreter."
    say "installing into .venv"
    rm -f "$stamp"
    "$python" -m venv "$ROOT/.venv"
    "$ROOT/.venv/bin/python" -m pip install --quiet --editable "$ROOT[all,dev]" </dev/null
    printf '%s\n' "$want" >"$stamp"
}

# -- compiled tests --------------------------------------------------------------------------------------------------

# Compile once. Otherwise each of many processes compiles the tests at its start, which takes ten seconds.
ensure_compiled() {
    ensure_venv
    local stamp=$ROOT/.venv/.compiled suite
    [ "$stamp" -nt "$ROOT/.venv/.installed" ] && return
    say "compiling the tests"
    for suite in tests integration; do
        (cd "$ROOT" && .venv/bin/python -m pytest -q --collect-only "$suite") >/dev/null 2>&1 &
    done
    wait
    touch "$stamp"
}

# -- Java ------------------------------------------------------------------------------------------------------------

ensure_java() {
    local java=java
    [ -n "${JAVA_HOME:-}" ] && java=$JAVA_HOME/bin/java
    if ! command -v "$java" >/dev/null; then
        apt_install 'Spark runs on Java' default-jre-headless
        command -v java >/dev/null || die "Java is installed, and is not on the PATH."
    fi
    ensure_venv
    [ "$ROOT/.venv/spark/classes.jsa" -nt "$ROOT/.venv/.installed" ] && return
    say "making what lets Spark start faster"
    (cd "$ROOT" && .venv/bin/python -m integration.support.spark) >/dev/null ||
        die "Spark did not run. Its error is above."
}

# -- libfaketime -----------------------------------------------------------------------------------------------------

faketime_library() {  # the path of the library, from Debian's package or a local installation
    local found
    for found in /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/local/lib/faketime/libfaketimeMT.so.1; do
        [ -e "$found" ] && echo "$found" && return
    done
    return 1
}

ensure_faketime() {
    faketime_library && return
    apt_install 'a wall clock that jumps' libfaketime
    faketime_library || die "libfaketime is installed, and not where it was looked for."
}

# -- strace ----------------------------------------------------------------------------------------------------------

ensure_strace() {
    command -v strace >/dev/null || apt_install 'seeing what is synchronised with the disk' strace
}

# -- Prometheus ------------------------------------------------------------------------------------------------------

ensure_prometheus() {
    command -v prometheus >/dev/null && command -v promtool >/dev/null && return
    apt_install 'checking alerts and dashboards' prometheus
    command -v prometheus >/dev/null || die "Prometheus is installed, and is not on the PATH."
}

# -- Chromium --------------------------------------------------------------------------------------------------------

ensure_chromium() {
    [ -x /usr/bin/chromium ] || apt_install 'looking at the web page' chromium
}

# -- docker daemon ---------------------------------------------------------------------------------------------------

docker_answers() { timeout 20 docker info >/dev/null 2>&1 </dev/null; }

ensure_docker() {
    command -v docker >/dev/null && docker_answers && return
    if [ -n "${DOCKER_HOST:-}" ]; then
        die "no docker daemon answers at DOCKER_HOST=$DOCKER_HOST."
    fi
    [ "$(id -u)" -eq 0 ] ||
        die "no docker daemon answers: start it, or let this user reach it (group docker), or run this as root on Debian."
    command -v dockerd >/dev/null && command -v docker >/dev/null || apt_install 'running a broker' docker.io iptables
    docker_answers && return
    if [ -d /run/systemd/system ]; then
        systemctl start docker || true
    else
        # Without an init system (a container, a minimal machine), start the daemon here, detached from this terminal
        # and its signals. The kernel alone forwards container ports: proxies would cost a tenth of the CPU time.
        say "starting dockerd, log in $DAEMON_LOG"
        setsid dockerd --userland-proxy=false >"$DAEMON_LOG" 2>&1 </dev/null &
    fi
    local deadline=$((SECONDS + DAEMON_DEADLINE))
    until docker_answers; do
        [ $SECONDS -lt $deadline ] || {
            [ -e "$DAEMON_LOG" ] && tail -n 20 "$DAEMON_LOG" >&2
            die "the docker daemon does not answer after $DAEMON_DEADLINE s."
        }
        sleep 0.5
    done
}

# -- broker images ---------------------------------------------------------------------------------------------------

ensure_image() {
    local line=$1 tag=reliable-mq/rabbitmq:$1 setting official suites recipe base
    case $line in
        newest) setting=${RELIABLE_MQ_BROKER_IMAGE:-} official=rabbitmq:4-management suites='sid testing' ;;
        4.0) setting=${RELIABLE_MQ_BROKER_IMAGE_40:-} official=rabbitmq:4.0-management suites=trixie ;;
        *) die "there is no broker line '$line': newest or 4.0." ;;
    esac
    recipe=$( (cat "$RECIPE_DIR"/*; printf '%s\n' "$DEBIAN_PACKAGES" "$setting") | sha256sum | cut -c1-16)
    [ "$(docker image inspect --format '{{index .Config.Labels "reliable-mq.recipe"}}' "$tag" 2>/dev/null)" = "$recipe" ] &&
        return
    if [ -n "$setting" ]; then
        has_image "$setting" || docker pull "$setting" >&2 || die "the image $setting cannot be had."
        base=$setting
    elif has_image "$official" || timeout "$PULL_DEADLINE" docker pull "$official" >&2 </dev/null; then
        base=$official
    else
        say "$official cannot be had from a registry: making an image from Debian's packages"
        base=$(debian_image "$suites")
    fi
    say "building $tag from $base"
    docker build --quiet --build-arg "BASE=$base" --label "reliable-mq.recipe=$recipe" --tag "$tag" "$RECIPE_DIR" >&2
}

has_image() { docker image inspect "$1" >/dev/null 2>&1; }

debian_image() {  # debian_image "SUITE..." -> name of an image with RabbitMQ from the first suite that can be installed
    local suite name
    for suite in $1; do
        name=reliable-mq/debian:$suite-$(printf '%s' "$DEBIAN_PACKAGES" | sha256sum | cut -c1-8)
        if has_image "$name" || debootstrap_image "$suite" "$name" "$DEBIAN_PACKAGES" \
            'ENV HOME=/var/lib/rabbitmq LANG=C.UTF-8' 'USER rabbitmq' 'VOLUME /var/lib/rabbitmq' \
            'CMD ["/usr/lib/rabbitmq/bin/rabbitmq-server"]'; then
            echo "$name"
            return
        fi
        say "debootstrap of $suite failed"
    done
    die "no broker image: set RELIABLE_MQ_BROKER_IMAGE (and RELIABLE_MQ_BROKER_IMAGE_40) to RabbitMQ images you have."
}

ensure_databases() {
    databases_image latest RELIABLE_MQ_DATABASES_IMAGE "$DATABASE_PACKAGES" 'trixie bookworm'
    databases_image mysql RELIABLE_MQ_MYSQL_IMAGE "$MYSQL_PACKAGES" 'sid testing'
}

databases_image() {  # databases_image TAG SETTING PACKAGES "SUITE..."
    local tag=reliable-mq/databases:$1 setting=${!2:-} packages=$3 suites=$4 recipe base suite
    recipe=$( (cat "$DATABASES_DIR"/*; printf '%s\n' "$packages" "$setting") | sha256sum | cut -c1-16)
    [ "$(docker image inspect --format '{{index .Config.Labels "reliable-mq.recipe"}}' "$tag" 2>/dev/null)" = "$recipe" ] &&
        return
    base=$setting
    for suite in $suites; do
        [ -z "$base" ] || break
        base=reliable-mq/databases-debian:$suite-$(printf '%s' "$packages" | sha256sum | cut -c1-8)
        has_image "$base" || debootstrap_image "$suite" "$base" "$packages" || base=''
    done
    [ -n "$base" ] || die "no databases: set $2 to an image that has $packages."
    say "building $tag from $base"
    docker build --quiet --build-arg "BASE=$base" --label "reliable-mq.recipe=$recipe" --tag "$tag" "$DATABASES_DIR" >&2
}

ensure_python() {
    local name
    name=reliable-mq/python:sid-$(printf '%s' "$PYTHON_PACKAGES" | sha256sum | cut -c1-8)
    has_image "$name" || debootstrap_image sid "$name" "$PYTHON_PACKAGES" || die "debootstrap of sid failed"
    echo "$name"
}

debootstrap_image() (  # debootstrap_image SUITE NAME PACKAGES [CHANGE...]; a subshell, so that its traps stay local
    suite=$1 name=$2 packages=$3 changes=()
    shift 3
    for change in "$@"; do changes+=(--change "$change"); done
    command -v debootstrap >/dev/null || apt_install 'making an image' debootstrap
    [ "$(id -u)" -eq 0 ] || die "debootstrap needs root: set RELIABLE_MQ_..._IMAGE to images you have (see the top)."
    directory=$(mktemp -d "${TMPDIR:-/var/tmp}/reliable-mq-$suite.XXXXXX")
    trap 'rm -rf --one-file-system "$directory"' EXIT
    script=/usr/share/debootstrap/scripts/$suite
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
    apt_proxy
    say "debootstrap of $suite (about a minute)"
    # If apt has no Debian mirror, the name is empty and debootstrap uses its default.
    debootstrap --variant=minbase --include="$packages" "$suite" "$directory/root" \
        "$(debian_mirror)" "$script" >"$directory/log" 2>&1 </dev/null || {
        tail -n 5 "$directory/log" >&2
        exit 1
    }
    cd "$directory/root" || exit 1
    rm -rf var/cache/apt/* var/lib/apt/lists/* usr/share/doc usr/share/man usr/share/locale
    tar -c --one-file-system . | docker import "${changes[@]}" - "$name" >/dev/null
)

debian_mirror() {  # the mirror from which apt on this machine gets Debian's packages
    apt-get indextargets --format '$(ORIGIN) $(LABEL) $(REPO_URI)' 'Created-By: Packages' |
        awk '$1 == "Debian" && $2 == "Debian" && $3 ~ /^(https?|file):/ && !found {print $3; found = 1}'
}

apt_proxy() {  # for debootstrap, which downloads with wget and ignores apt's settings
    local found=''
    [ -n "${http_proxy:-}" ] && return
    eval "$(apt-config shell found Acquire::http::Proxy)"
    [ -z "$found" ] || export http_proxy=$found
}

main "$@"
