#!/usr/bin/env bash
# Builds the documentation site into build/site and checks it: mkdocs warnings are errors, every link and anchor exists,
# and no page loads anything from the network. It needs no build of onnxtrain. The first call makes an environment in
# build/docs-venv; later ones work without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=build/docs-venv
if ! cmp -s docs/requirements.txt "$venv/requirements.txt"; then
    "${ONNXTRAIN_PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r docs/requirements.txt
    cp docs/requirements.txt "$venv/requirements.txt"
fi
if ! log=$("$venv/bin/python" -m mkdocs build --strict --clean 2>&1); then
    echo "$log" >&2
    exit 1
fi
"$venv/bin/python" tools/check_site.py build/site
