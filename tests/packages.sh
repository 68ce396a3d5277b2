#!/usr/bin/env bash
# Installs the system packages that a build needs, on Debian, Ubuntu, and AlmaLinux 8 (the image manylinux_2_28), and
# those of its arguments. For the workflows, whose images have compilers and Python; tests/setup.sh looks for what is
# missing itself.
set -euo pipefail
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
if command -v apt-get >/dev/null; then
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        protobuf-c-compiler protobuf-compiler libprotobuf-c-dev "$@" >/dev/null
else
    "${as_root[@]}" dnf install -y -q 'dnf-command(config-manager)'
    "${as_root[@]}" dnf config-manager --set-enabled powertools
    "${as_root[@]}" dnf install -y -q protobuf-c-devel protobuf-c-compiler protobuf-compiler "$@"
fi
