#!/usr/bin/env bash
# Installs what the tests of containers need, if this user may install Debian's packages.
set -euo pipefail
if command -v podman && command -v debootstrap && command -v runc; then exit; fi >/dev/null
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "podman and debootstrap are not installed: tests of containers are skipped"
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends podman runc debootstrap >/dev/null ||
    echo "podman and debootstrap cannot be installed: tests of containers are skipped"
