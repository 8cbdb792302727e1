#!/usr/bin/env bash
# Builds the archives of a release into dist/: the programs and deploy/ for each platform, checksums, and a list of the
# modules in each program (SBOM, CycloneDX). The same commit gives the same bytes with the same version of Go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION=${VERSION:-$(git describe --tags --always)}
PLATFORMS=${PLATFORMS:-linux/amd64 linux/arm64}
DIST=${DIST:-dist}
COMMIT=$(git rev-parse HEAD)
EPOCH=$(git log -1 --format=%ct)
ldflags="-s -w -buildid= -X github.com/penstock/penstock/internal/version.release=$VERSION -X github.com/penstock/penstock/internal/version.commit=$COMMIT"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
rm -rf "$DIST"
mkdir -p "$DIST"
for platform in $PLATFORMS; do
  os=${platform%/*} arch=${platform#*/}
  name=penstock_${VERSION}_${os}_${arch}
  mkdir -p "$stage/$name"
  CGO_ENABLED=0 GOOS=$os GOARCH=$arch GOFLAGS= \
    go build -trimpath -buildvcs=false -ldflags "$ldflags" -o "$stage/$name/" ./cmd/...
  git archive HEAD LICENSE CHANGELOG.md deploy | tar -x -C "$stage/$name"
  for program in "$stage/$name"/{leader,tasknode,gateway,penstock}; do
    [ -x "$program" ] || continue
    go version -m -json "$program" | go run ./deploy/sbom "$(basename "$program")" "$VERSION" \
      >"$stage/$name/$(basename "$program").cdx.json"
  done
  # Owners, times and order are those of the commit, not of this machine.
  tar -C "$stage" --sort=name --mtime="@$EPOCH" --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' -c "$name" |
    gzip -n -9 >"$DIST/$name.tar.gz"
done
(cd "$DIST" && sha256sum ./*.tar.gz | sed 's, \./, ,' >checksums.txt)
cat "$DIST/checksums.txt"
