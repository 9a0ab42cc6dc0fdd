# shellcheck shell=bash
# For the other scripts, which source it: installs what is missing, on Debian or Ubuntu, as root
# or through sudo.

# Of modules, the system's Python is asked first: the packages are for that one, and another may
# come before it on the path. server/tests/leases/wire.rs takes the same one.
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
  # A mirror may fail for a moment, and another process may hold the lock.
  local patient=(-qq -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300)
  # An index that can't be renewed may still do: whether it does, the installation tells.
  "${as_root[@]}" apt-get update "${patient[@]}" >&2 || echo "apt-get update failed" >&2
  # RUNLEVEL=1 keeps the packages from starting their services: scripts start their own.
  "${as_root[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    apt-get install "${patient[@]}" -y --no-install-recommends "${missing[@]}" >&2
  for pair in "$@"; do
    there "${pair%%:*}" || {
      echo "${pair##*:} is installed, and yet this fails: ${pair%%:*}" >&2
      exit 1
    }
  done
}
