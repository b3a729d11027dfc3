#!/usr/bin/env bash
# Installs the browser that the tests of the viewer drive, if this user may install Debian's packages.
set -euo pipefail
if command -v chromium; then exit; fi >/dev/null
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium is not installed: tests of the viewer in a browser are skipped"
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
    echo "chromium cannot be installed: tests of the viewer in a browser are skipped"
