#!/usr/bin/env bash
# Builds the container image of a commit without a network. IMAGE, GO_IMAGE and DOCKER can be set in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
IMAGE=${IMAGE:-penstock:dev}
GO_IMAGE=${GO_IMAGE:-golang:1.26}
DOCKER=${DOCKER:-docker}

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git archive HEAD | tar -x -C "$context"
(cd "$context" && go mod vendor)
mkdir "$context/.tmp" && touch "$context/.tmp/keep" # the builder may have no /tmp
cp /etc/ssl/certs/ca-certificates.crt "$context/"

if [ "$GO_IMAGE" = local ]; then
  GO_IMAGE=penstock-go:local
  tar -C "$(go env GOROOT)" --transform 's,^\.,usr/local/go,' -c . | $DOCKER import - "$GO_IMAGE" >/dev/null
fi
DOCKER_BUILDKIT=0 $DOCKER build --network none -t "$IMAGE" --build-arg GO_IMAGE="$GO_IMAGE" \
  --build-arg VERSION="$(git describe --tags --always --dirty)" --build-arg COMMIT="$(git rev-parse HEAD)" "$context"
