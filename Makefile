# `make` alone prints what there is. `make check` is what CI runs.
# Everything here works on a machine that has only Go: the linters are built from tools/go.mod, and Postgres is
# taken from the machine or, because this Makefile consents to it, downloaded at a pinned version and hash.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

export PENSTOCK_ALLOW_DOWNLOAD ?= 1

# The race detector needs a C compiler; where there is none, go reports CGO_ENABLED=0 and the same tests run without it. Nothing
# else is compiled for it, so that the compiler need not write the tables for debuggers that the linker then leaves out.
RACE    ?= $(if $(filter 1,$(shell go env CGO_ENABLED)),-race -gcflags=all=-dwarf=false)
TESTS   ?= ./...
TIMEOUT ?= 20m
ARGS    ?=
# Where Postgres is installed, tests are built without the client of Docker. Linters read them under the same tag: each test
# package is compiled once for both.
TAGS    := $(if $(shell command -v postgres || compgen -G '/usr/lib/postgresql/*/bin/postgres'),nocontainer)
# Programs of tests are linked without tables for debuggers, which a trace of a panic or a race does not need: it takes two
# thirds of the time. Without the client of Docker it takes half of the rest.
LINK    := -ldflags='-s -w' $(TAGS:%=-tags=%)
# Packages that are tested at a time: half of them wait for Postgres, for leases or for a clock. The race detector leaves
# fewer cores idle.
BESIDE      ?= 6
BESIDE_RACE ?= 4
GO_IMAGE ?= golang:1.26
SOAK    ?= 10m

# Modules of their own, so that the product's go.mod lists only what it runs on. One without Go files yet is left out.
MODULES := $(sort $(foreach mod,$(wildcard examples/*/go.mod bench/go.mod bench/*/go.mod chaos/go.mod web/*/go.mod),$(if $(shell find $(dir $(mod)) -name '*.go' -print -quit),$(patsubst %/,%,$(dir $(mod))))))

# npm packages bring Go files of their own.
GOFILES := find . \( -name node_modules -o -name .git -o -path ./tmp \) -prune -o -name '*.go' -print

GOFUMPT := bin/gofumpt
LINT    := bin/golangci-lint
VULN    := bin/govulncheck

.PHONY: help vuln check-postgres quiet models models-short fuzz-short bench run dev programs build fmt fmt-check vet lint test race plain race-all timed timed-link unraced e2e e2e-load check check-worker check-modules check-clients bench-guard bench-peers bench-curves bench-sizing bench-dispatch bench-dashboard screenshots bench-gateway bench-gpu chaos chaos-mutants sim soak noisy replay clean

help: ## Print this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: programs ## Start everything on an embedded Postgres and push real work through it; ARGS=--once ends after the first batch
	bin/penstock dev $(ARGS)

dev: programs ## The same, with the database kept in tmp/dev between runs
	bin/penstock dev --data tmp/dev $(ARGS)

programs:
	@mkdir -p bin
	go build -o bin/ ./cmd/...
	go -C examples/worker build -o ../../bin/worker .

# Programs are linked once, to bin/. What else there is is compiled: `go build ./...` would link each program again, and each of
# bench as well, and throw it away.
build: ## Build every module; programs go to bin/
	@mkdir -p bin
	go build -o bin/ ./cmd/...
	go -C examples/worker build -o ../../bin/worker .
	go list -export ./... >/dev/null
	@for module in $(MODULES); do echo "build $$module"; go -C "$$module" list -export ./... >/dev/null || exit 1; done

fmt: $(GOFUMPT) ## Format all Go files
	$(GOFILES) | xargs $(GOFUMPT) -w

fmt-check: $(GOFUMPT)
	@unformatted=$$($(GOFILES) | xargs $(GOFUMPT) -l); \
	if [ -n "$$unformatted" ]; then echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; fi

vet:
	go vet ./...
	@for module in $(MODULES); do echo "vet $$module"; go -C "$$module" vet ./... || exit 1; done

# With memory for it, half of the time that the collector takes is left. The rules of .golangci.yml take nothing of gosec from
# the other modules, so that it does not run there. Two checks on one machine may lint at the same time.
lint: export GOGC ?= 400
lint: $(LINT) ## Run the linters of .golangci.yml over every module
	$(LINT) run --allow-parallel-runners $(TAGS:%=--build-tags=%) ./...
	@for module in $(MODULES); do \
		echo "lint $$module"; \
		(cd "$$module" && $(CURDIR)/$(LINT) run --allow-parallel-runners --config $(CURDIR)/.golangci.yml $(TAGS:%=--build-tags=%) --disable gosec ./...) || exit 1; \
	done

# Not in `make check`: the answer changes with the database of vulnerabilities and not with the code, and needs the network.
vuln: $(VULN) ## Look for known vulnerabilities in what the programs call; needs vuln.go.dev, or VULNDB=file:///a/copy
	@$(VULN) $(if $(VULNDB),-db $(VULNDB)) ./... || { status=$$?; [ $$status -ne 1 ] || \
		echo "govulncheck did not run: it needs https://vuln.go.dev, or a copy of that database, VULNDB=file:///a/copy" >&2; exit $$status; }

# The name of a test says with which target it runs:
#   TestTimed...    compares times, or keeps a bound on time that a protocol promises. It says nothing under the race detector, nor
#                   while other packages have the same cores: `make timed`, one after another.
#   TestUnraced...  has one goroutine (a simulation, a statement whose cost the server counts, a key that is stretched). The race
#                   detector has nothing to find there, and slows it three to ten times: `make unraced`.
#   TestLong...     takes long: random schedules and crashes, large loads, programs that it builds. It is no test for every day,
#                   and is raced by `make race-all` alone: `make unraced` runs it in each check.
# All others run in `make test` and, divided between them, in `make race` and `make plain`.
APART := Timed|Unraced|Long

# HAVING prints the packages with tests of a kind.
HAVING = $$(grep -rlE --include='*_test.go' '^func Test($(1))[A-Z]' cmd internal pkg web examples | sed 's,/[^/]*$$,,; s,^,./,' | sort -u)

# PACKAGES are those of TESTS, those with the longest tests first: begun last, they would run alone at the end. e2e has a
# target of its own.
LONGEST  := ./pkg/invalidation ./pkg/inference ./pkg/tasknode ./cmd/tasknode ./pkg/scale ./migrations ./pkg/api ./cmd/gateway ./pkg/recovery ./pkg/doctor ./pkg/worker ./pkg/maintenance ./cmd/penstock ./web ./pkg/cron ./pkg/operator ./pkg/batch ./pkg/changelog ./pkg/election ./pkg/gateway/openaibatch ./pkg/gateway ./internal/devpostgres
PACKAGES  = $(if $(filter ./...,$(TESTS)),$(LONGEST) $$(go list ./... | grep -v /e2e$$),$(TESTS))

# EVERYDAY are the packages without the one that makes private clusters: its tests run initdb some twenty times.
EVERYDAY  = $(if $(filter ./...,$(TESTS)),$(filter-out ./internal/devpostgres,$(LONGEST)) $$(go list ./... | grep -v -e /e2e$$ -e /devpostgres$$),$(TESTS))

# Compiler, linker and tests collect garbage a quarter as often. Tests that judge times or memory are in timed and unraced, which
# have the usual setting.
build test race plain race-all timed-link check-modules: export GOGC ?= 400

test: ## Test the product without the race detector, for every day; TESTS=./pkg/cron narrows it
	go test $(LINK) -vet=off -p $(BESIDE) -timeout $(TIMEOUT) -skip '^Test($(APART))[A-Z]' $(EVERYDAY)
	@echo "not run: what takes long, simulations and the cost of statements (make unraced), private clusters (make plain), what is timed"
	@echo "(make timed), the real programs (make e2e), the other modules (make check-modules); and no test ran under the race detector"

# The tests of `make check` run on two versions of Postgres: race and plain on the newest one, which npm delivers, the others on
# that of the machine. A line that begins with "not tested" is printed again at the end of the check.
NEWEST := 18
ON_NEWEST = if probe=$$(PENSTOCK_TEST_POSTGRES=$(NEWEST) go test $(LINK) -vet=off -count=1 -run '^TestServerIsOfTheVersionAskedFor$$' ./internal/pgtest 2>&1); then \
		export PENSTOCK_TEST_POSTGRES=$(NEWEST); \
	else \
		tail -n 20 <<<"$$probe"; echo "not tested: Postgres $(NEWEST), which cannot be had here; make race and plain ran on that of this machine"; \
	fi

# The race detector is for memory that goroutines share. race has the packages with a goroutine, a lock or a channel in a file that
# is no test, and plain the others, and those of MOSTLY_ALONE: few of their tests share memory, and `make race-all` races them.
MOSTLY_ALONE := ./cmd/penstock ./internal/devpostgres ./web
DIVIDE = all=$$(printf '%s\n' $(PACKAGES) | sed 's,^github.com/penstock/penstock$$,.,; s,^github.com/penstock/penstock/,./,' | awk '!seen[$$0]++'); \
	shared=$$(go list -f '{{range .GoFiles}}{{$$.Dir}}/{{.}} {{end}}' $$all | xargs grep -lE '^\s*(defer )?go |\bchan\b|"sync(/atomic)?"|\.Go\(' | \
		sed 's,/[^/]*$$,,; s,^$(CURDIR)$$,.,; s,^$(CURDIR)/,./,' | sort -u | grep -vxF $(MOSTLY_ALONE:%=-e %) || true); \
	raced=$$(grep -xF "$$shared" <<<"$$all" || true); plain=$$(grep -vxF "$$shared" <<<"$$all" || true)

.PHONY: divide
divide: # prints what race and plain have
	@$(DIVIDE); echo raced $$raced; echo plain $$plain

race: ## Test under the race detector what shares memory, where the machine has a C compiler
	@$(ON_NEWEST); $(DIVIDE); [ -z "$$raced" ] || \
		go test $(RACE) $(LINK) -vet=off -p $(BESIDE_RACE) -timeout $(TIMEOUT) -skip '^Test($(APART))[A-Z]' $$raced

plain: ## Test without the race detector what `make race` leaves out
	@$(ON_NEWEST); $(DIVIDE); [ -z "$$plain" ] || \
		go test $(LINK) -vet=off -p $(BESIDE) -timeout $(TIMEOUT) -skip '^Test($(APART))[A-Z]' $$plain

race-all: ## Test everything but simulations under the race detector, the random tests in their full length; for every night
	@$(ON_NEWEST); PENSTOCK_LONG=1 go test $(RACE) $(LINK) -vet=off -p $(BESIDE_RACE) -timeout $(TIMEOUT) -skip '^Test(Timed|Unraced)[A-Z]' $(PACKAGES)

unraced: ## Test without the race detector what takes long, or has one goroutine
	RAPID_CHECKS=25 go test $(LINK) -vet=off -p $(BESIDE) -timeout $(TIMEOUT) -run '^Test(Unraced|Long)[A-Z]' $(call HAVING,Unraced|Long)

.PHONY: unraced-all
unraced-all: ## Test the same with a million entries and lines, and more runs of the simulations; for every night
	PENSTOCK_LONG=1 go test $(LINK) -vet=off -timeout $(TIMEOUT) -run '^TestUnraced[A-Z]' $(call HAVING,Unraced)

# The versions that are tested beside each other; those that the machine does not have come from npm.
POSTGRES ?= 15 16 17 18

check-postgres: ## Test the product on each version of Postgres, the long tests too; POSTGRES="17 18" narrows it
	@for version in $(POSTGRES); do \
		echo "==> Postgres $$version"; \
		PENSTOCK_TEST_POSTGRES=$$version $(MAKE) --no-print-directory APART=Timed test || exit 1; \
	done

# Linked apart from its run, so that `make check` links it beside other steps, and runs it alone.
timed-link:
	@mkdir -p bin/timed
	go test -c $(LINK) -vet=off -o bin/timed/ $(call HAVING,Timed)

timed: timed-link ## Test what has to be done within a number of seconds, alone on the machine
	@failed=0; \
	for package in $(call HAVING,Timed); do \
		echo "timed $$package"; \
		(cd "$$package" && $(CURDIR)/bin/timed/"$$(basename "$$package")".test -test.timeout $(TIMEOUT) -test.run '^TestTimed[A-Z]') || failed=1; \
	done; \
	exit $$failed

e2e: ## Start the real programs, kill them, and look at what is left; `make check` runs it as well
	go test $(LINK) -vet=off -count=1 -parallel 3 -timeout $(TIMEOUT) -v ./e2e

e2e-load: ## 50,000 entries through 8 slots with random worker faults, and the account of them; ENTRIES=2000 shortens it
	ENTRIES=$${ENTRIES:-50000} go test -count=1 -timeout 60m -run TestLoad -v ./e2e

check-worker: ## Test the example worker under the race detector
	go -C examples/worker test $(RACE) -timeout $(TIMEOUT) ./...

bench: ## Push and drain the queue by itself on a private Postgres, with WAL an entry; ARGS='-dsn postgres://...' takes another server
	go -C bench run ./cmd/core $(ARGS)

bench-guard: ## What an entry costs in WAL, buffers, statements and allocations, against its bounds; in `make check` as well
	go -C bench test -count=1 -v ./guard

bench-peers: ## Compare with other queues on one private Postgres; needs npm; ARGS=-short for one small round
	[ -d bench/peers/node/node_modules ] || npm ci --prefix bench/peers/node
	go -C bench run ./cmd/peers $(ARGS)

bench-curves: ## Throughput and latency against backlog, keys, flows, nodes, a held transaction ... ; ARGS=-short, ARGS='-axes keys -out ../docs/curves'
	go -C bench run ./cmd/curves $(ARGS)

bench-sizing: ## What a load takes of a database, by measured points, and how far the model is off; ARGS=-measure, ARGS='-rate 5000 -payload 1000'
	go -C bench run ./cmd/sizing $(ARGS)

bench-http: ## Push through a leader's HTTP API: single, lists and streams, entries a second, p99 and memory; ARGS=-short for a tenth
	go -C bench run ./cmd/http $(ARGS)

bench-gateway: programs ## Every target of the online gateway and its figure: beside a plain proxy, overload, hand-over, preemption, fairness, idle; ARGS=-short, or ARGS='-only streams,overload'
	go -C bench run ./cmd/gateway $(ARGS)

bench-dispatch: ## Calls a second through one node to a worker that answers at once, with 8, 64 and 512 slots
	go -C bench run ./cmd/dispatch $(ARGS)

bench-gpu: programs ## A transformer on a GPU, called directly, through a queue and through the gateway; cancels, a killed node, two flows; needs PyTorch and aiohttp
	go -C bench run ./cmd/gpu $(ARGS)

# CHAOS is how long the faults last: 90s in CI, 10m for every day, 6h for a soak.
CHAOS ?= 10m

chaos: ## Try to break every promise for ten minutes: real programs, a proxy, faults from a seed, judges; CHAOS=90s, ARGS='-seed 7'
	@mkdir -p bin
	go build -o bin/ ./cmd/leader ./cmd/tasknode ./cmd/gateway
	go -C chaos build -o ../bin/chaos .
	bin/chaos -bin bin -for $(CHAOS) $(ARGS)

# A fixed count of operations, and times that a busy machine can keep: what is judged are recorded times.
.PHONY: chaos-short
chaos-short:
	$(MAKE) --no-print-directory chaos CHAOS=4m ARGS='-seed 18 -ops 900 -lease 6s -drain 4m'

.PHONY: chaos-failpoints
chaos-failpoints: ## Run the fault harness on programs that end themselves before and after commits, by kind of transaction
	@mkdir -p bin/failpoints
	go build -tags failpoints -o bin/failpoints/ ./cmd/leader ./cmd/tasknode ./cmd/gateway
	go -C chaos build -o ../bin/chaos .
	bin/chaos -bin bin/failpoints -failpoints -for $(CHAOS) $(ARGS)

.PHONY: chaos-scale
chaos-scale: ## Faults for the autoscaler on real leaders, processes and a provider, SEED=1: is a call interrupted? CHAOS=2m
	PENSTOCK_SCALE_CHAOS=$(CHAOS) PENSTOCK_SCALE_SEED=$${SEED:-1} go test -vet=off -count=1 -timeout 0 -run TestAutoscalerUnderFaults -v ./e2e

.PHONY: chaos-release
chaos-release: ## Run the fault harness until 500 programs were killed and 1,000 answers to each kind of commit were lost; about an hour
	@mkdir -p bin
	go build -o bin/ ./cmd/leader ./cmd/tasknode ./cmd/gateway
	go -C chaos build -o ../bin/chaos .
	bin/chaos -bin bin -release -for 90m -drain 15m -rate 5 -nodes 3 -leaders 2 $(ARGS)

chaos-mutants: ## Put one known bug after another into the programs: the fault harness must find each; ARGS='-only hint,lease', ARGS='-results FILE' to go on
	go -C chaos build -o ../bin/chaos .
	cd chaos && ../bin/chaos -mutants -seed 1 $(ARGS)

SEEDS ?= 100000
FROM  ?= 1
PROCESSES ?= 0
sim: ## Run the simulation from SEEDS=100000 schedules, the first of which is FROM=1, on all cores or in PROCESSES=1; it prints the steps of one that fails
	go -C chaos test ./sim -count=1 -timeout 0 -run '^TestSimulation$$' -v -seeds $(SEEDS) -from $(FROM) -processes $(PROCESSES)

screenshots: ## Write docs/images from seeded data, by chromium
	mkdir -p docs/images
	go -C web/browser test -count=1 -run TestScreenshots . -screenshots $(CURDIR)/docs/images

bench-dashboard: ## Time each page over 10 million rows, in chromium too, and count statements of 50 tabs; ROWS=3000000 for the short form
	PENSTOCK_DASHBOARD_ROWS=$${ROWS:-10000000} go test -count=1 -timeout 60m -run 'TestPagesOverManyRows|TestLongFiftyTabs' -v ./web
	PENSTOCK_TIMED=1 PENSTOCK_DASHBOARD_ROWS=$${ROWS:-10000000} go -C web/browser test -count=1 -timeout 60m \
		-run 'TestAFirstVisitLoads|TestAPushIsDisplayed' -v .

soak: ## Ten minutes of inference on hostile workers while nodes die; SOAK=1m shortens it
	PENSTOCK_SOAK=$(SOAK) go test -count=1 -timeout 60m -run TestTimedSoak -v ./pkg/inference

replay: ## How long tenants wait in fifo and in fair queues, on simulated nodes; ARGS='-trace ../lora_request_trace.csv' takes a real trace
	go -C bench run ./cmd/replay $(ARGS)

noisy: ## A quiet tenant beside one with 200,000 entries in line, on two real nodes; NOISY=10s shortens it
	PENSTOCK_NOISY=$${NOISY:-1m} go test -count=1 -timeout 20m -run TestTimedNoisyNeighbour -v ./cmd/tasknode

quiet: ## How long a quiet flow waits for a scarce slot beside 2,000 entries of another, solo and grouped, on the real programs
	PENSTOCK_QUIET=1 go test -count=1 -timeout 20m -run TestQuietFlow -v ./e2e

# Each fuzz target of the product for a short while; `go test -fuzz` takes one of one package at a time.
FUZZTIME ?= 10s

fuzz-short: ## Fuzz every decoder for ten seconds each; FUZZTIME=1m for longer
	@for package in $$(grep -rlE --include='*_test.go' '^func Fuzz' pkg internal cmd | xargs -n1 dirname | sort -u); do \
		for target in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]+' $$package/*_test.go | cut -d' ' -f2); do \
			echo "$$package $$target"; go test ./$$package -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) || exit 1; \
		done; \
	done

models: ## Check the models of the protocols with Spin, in their whole state space; models/README.md
	models/check

models-short:
	models/check -short

check-clients: ## npm's clients of OpenAI and Replicate against a gateway; needs npm
	[ -d examples/clients/node_modules ] || npm ci --prefix examples/clients
	go test -count=1 -run TestClients -v ./cmd/gateway

# The patches of chaos/mutants are for files of the product, of which go test does not know that the test reads them.
check-modules:
	@for module in $(MODULES); do \
		echo "test $$module"; \
		go -C "$$module" test $(LINK) -vet=off -timeout $(TIMEOUT) -skip '^TestMutantsApplyAndCompile$$' ./... || exit 1; \
	done
	go -C chaos test $(LINK) -vet=off -count=1 -timeout $(TIMEOUT) -run '^TestMutantsApplyAndCompile$$' ./mutants
	go test -ldflags='-s -w' -tags=failpoints$(TAGS:%=,%) -vet=all -count=1 -run TestFailpoints ./internal/postgres

# govet is one of the linters, which read tests too, so that `make check` has no step vet, nor `go test` its own. Some steps leave
# the processors idle for half of their time: three sequences of steps go on beside each other, of which e2e and chaos-short have
# the higher priority. Tests of the others wait for states: the few bounds on real time in them are for what hangs, or grows with
# the square, and lie far above what it takes at the low priority. What has to be done within a time is in timed, alone, last.
check: ## What CI runs: format, build, linters, all tests
	@.ci/steps 'fmt-check build' \
		beside 'e2e chaos-short' 'lint models-short check-modules check-deploy unraced timed-link' 'race plain' then 'timed'

.PHONY: image check-image release check-release check-kubernetes check-deploy

image: ## Build the container image without a network; GO_IMAGE=local makes the builder of this machine's Go
	GO_IMAGE='$(GO_IMAGE)' deploy/image.sh

check-image: ## Start the image in Docker as compose does, and run entries through it; IMAGE=penstock:dev after `make image`
	TESTCONTAINERS_RYUK_DISABLED=true PENSTOCK_IMAGE=$${IMAGE:-penstock:dev} go test -count=1 -timeout $(TIMEOUT) -run TestImage -v ./e2e

release: ## Archives for each platform with checksums and a list of modules, in dist/
	deploy/release.sh

check-release: ## Build one platform of the release twice, the second time in a fresh clone: both must be equal
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	DIST="$$tmp/one" PLATFORMS=linux/amd64 VERSION=check deploy/release.sh >/dev/null; \
	git clone -q . "$$tmp/clone"; \
	DIST="$$tmp/two" PLATFORMS=linux/amd64 VERSION=check "$$tmp/clone/deploy/release.sh" >/dev/null; \
	diff "$$tmp/one/checksums.txt" "$$tmp/two/checksums.txt" && cat "$$tmp/one/checksums.txt"

check-kubernetes: ## Test the backend and its rights on a real API server; PENSTOCK_TEST_KUBE_APISERVER is the path of a kube-apiserver
	@: "$${PENSTOCK_TEST_KUBE_APISERVER:?set it to the path of a kube-apiserver}"
	go test -count=1 -timeout $(TIMEOUT) -run TestOnARealAPIServer -v ./pkg/scale/backend

check-deploy: ## Check the manifests against the published schemas of Kubernetes, and let systemd check the units where it is there
	go -C deploy/validate test -count=1 ./...
	@if command -v systemd-analyze >/dev/null; then \
		tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
		for unit in deploy/systemd/*.service; do sed 's,^ExecStart=[^ ]*,ExecStart=/bin/true,' "$$unit" >"$$tmp/$$(basename "$$unit")"; done; \
		systemd-analyze verify "$$tmp"/*.service; \
		mkdir "$$tmp/penstock-leader.service.d"; cp deploy/systemd/scale-local.conf "$$tmp/penstock-leader.service.d"; \
		systemd-analyze verify "$$tmp/penstock-leader.service"; \
	fi

clean: ## Remove what make built
	rm -rf bin

$(GOFUMPT): tools/go.mod tools/go.sum
	go build -C tools -o ../$@ mvdan.cc/gofumpt

$(VULN): tools/go.mod tools/go.sum
	go build -C tools -o ../$@ golang.org/x/vuln/cmd/govulncheck

$(LINT): tools/go.mod tools/go.sum
	@echo "building golangci-lint from source, once: about a minute on two cores"
	go build -C tools $(LINK) -o ../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
