#!/usr/bin/env bash
# Draws the README's pictures: a training plan, a deployment and a placement, planned here and now.
# Needs: pip install -e '.[report]' and a Chromium. About a minute.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

moetune plan "$here/../worked/mixtral-8x7b-64-a100/spec.yaml" -o "$work/training"
moetune plan "$here/../serving/mixed-pool.yaml" -o "$work/serving"
moetune plan "$here/../placement/balance.yaml" -o "$work/placement"
for kind in training serving placement; do
    python "$here/draw.py" "$work/$kind" "$here/$kind.png"
done
