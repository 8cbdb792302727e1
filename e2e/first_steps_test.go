package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/pgtest"
)

var (
	shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")
	goBlock    = regexp.MustCompile("(?s)```go\n(.*?)```")
)

func TestTheFirstStepsDoWhatTheirPageSays(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/first-steps.md")
	if err != nil {
		t.Fatal(err)
	}
	programs := t.TempDir()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	built := filepath.Join(programs, "greeting")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", built, "../examples/greeting").CombinedOutput()
	if err != nil {
		t.Fatalf("build the example: %v\n%s", err, out)
	}
	script := "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
	for _, block := range shellBlock.FindAllStringSubmatch(string(page), -1) {
		script += block[1]
	}
	leader := fmt.Sprintf("127.0.0.1:%d", machine.FreePort(t))
	script = strings.ReplaceAll(script, "127.0.0.1:8420", leader)

	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, "bash", "-c", script)
	run.WaitDelay = 10 * time.Second
	run.Env = []string{
		"PATH=" + programs + ":" + dir + ":" + os.Getenv("PATH"), "HOME=" + t.TempDir(),
		"PENSTOCK_DATABASE_URL=" + pgtest.Empty(t), "PENSTOCK_LEADER_LISTEN=" + leader,
		"PENSTOCK_LEADER_DEBUG_LISTEN=127.0.0.1:0",
	}
	out, err = run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		`"id":1,"verdict":"inserted"`, "no_node: no live node serves the queue", `{"text":"Hello, Ann"}`,
		`{"text": "Hello, Bob"}`, `{"text":"Hello, Cid"}`, "the name is empty",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the commands did not print %s", want)
		}
	}
	if t.Failed() {
		t.Logf("they printed:\n%s", out)
	}
}

func TestTheProgramOfTheFirstStepsIsTheExample(t *testing.T) {
	page, err := os.ReadFile("../docs/first-steps.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("../examples/greeting/main.go")
	if err != nil {
		t.Fatal(err)
	}
	block := goBlock.FindStringSubmatch(string(page))
	if block == nil {
		t.Fatal("docs/first-steps.md has no Go")
	}
	for declaration := range strings.SplitSeq(block[1], "\n\n") {
		if !strings.Contains(string(program), strings.TrimSpace(declaration)) {
			t.Errorf("examples/greeting/main.go lacks this part of docs/first-steps.md:\n%s", declaration)
		}
	}
}
