# The programs, and nothing else: no shell, no libc, no user but one without a name.
#
# `make image` prepares the context: the sources of a commit, their modules as vendor/, and the certificates of the
# machine. Nothing is downloaded during the build. GO_IMAGE is any image that has Go below /usr/local/go; where no registry
# can be reached, `make image GO_IMAGE=local` makes one of the toolchain of this machine.
ARG GO_IMAGE=golang:1.26
FROM ${GO_IMAGE} AS build
ARG VERSION=devel
ARG COMMIT=unknown
WORKDIR /src
COPY . .
ENV CGO_ENABLED=0 GOCACHE=/src/.cache GOTMPDIR=/src/.tmp GOTOOLCHAIN=local \
    GOFLAGS="-mod=vendor -trimpath -buildvcs=false '-ldflags=-s -w -buildid= -X github.com/penstock/penstock/internal/version.release=${VERSION} -X github.com/penstock/penstock/internal/version.commit=${COMMIT}'"
# Without a shell, which the image of a bare toolchain does not have.
RUN ["/usr/local/go/bin/go", "build", "-o", "/out/", "./cmd/..."]

FROM scratch
COPY --from=build /out/ /usr/local/bin/
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PATH=/usr/local/bin
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/penstock"]
