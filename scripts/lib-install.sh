# shellcheck shell=bash
# Sourced by the other scripts: installs missing packages on Debian or Ubuntu, as root or with sudo.

# Whether a command, or a Python module, is installed. Modules are looked up in the system's Python
# first: Debian's packages are for it, and another Python may precede it on the PATH.
# server/tests/leases/wire.rs uses the same one.
there() {
  case "$1" in
    import\ *) /usr/bin/python3 -c "$1" 2>/dev/null || python3 -c "$1" 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

# install_missing WHAT:PACKAGE...: installs PACKAGE if WHAT is missing, a command or a line of Python
# that imports modules.
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
  # A mirror may fail temporarily, and another process may hold the lock.
  local patient=(-qq -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300)
  # If the update fails, the old package index may still be good enough for the installation.
  "${as_root[@]}" apt-get update "${patient[@]}" >&2 || echo "apt-get update failed" >&2
  # RUNLEVEL=1 keeps packages from starting services: the scripts start their own.
  "${as_root[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    apt-get install "${patient[@]}" -y --no-install-recommends "${missing[@]}" >&2
  for pair in "$@"; do
    there "${pair%%:*}" || {
      echo "${pair##*:} is installed, and yet this fails: ${pair%%:*}" >&2
      exit 1
    }
  done
}
