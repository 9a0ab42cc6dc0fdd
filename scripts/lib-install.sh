# shellcheck shell=bash
# For the other scripts, which source it: installs what is missing, on Debian or Ubuntu, as root
# or through sudo.

# Of modules, the system's Python is asked first: the packages are for that one, and another may
# come before it on the path. server/tests/capacity_wire.rs takes the same one.
there() {
  case "$1" in
    import\ *) /usr/bin/python3 -c "$1" 2>/dev/null || python3 -c "$1" 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

# install_missing WHAT:PACKAGE...: WHAT is a command, or a line of Python that imports modules; the
# package has it.
install_missing() {
  local pair missing=() as_root=()
  for pair in "$@"; do
    there "${pair%%:*}" || missing+=("${pair##*:}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  printf '\n== installing %s\n' "${missing[*]}" >&2
  command -v apt-get >/dev/null || {
    echo "these packages are missing, and there is no apt-get to install them: ${missing[*]}" >&2
    exit 1
  }
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq >&2
  # RUNLEVEL=1 keeps the packages from starting their services: scripts start their own.
  "${as_root[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
  for pair in "$@"; do
    there "${pair%%:*}" || {
      echo "${pair##*:} is installed, and yet this fails: ${pair%%:*}" >&2
      exit 1
    }
  done
}
