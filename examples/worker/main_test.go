package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
)

// process is the real binary.
type process struct {
	*testing.T
	cmd    *exec.Cmd
	url    string
	stderr bytes.Buffer
}

// build returns the program. The one that `make build` has left in bin is copied first: the build links it only where it is not
// up to date.
func build(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "worker")
	if text, err := os.ReadFile("../../bin/worker"); err == nil {
		if err := os.WriteFile(binary, text, 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return binary
}

// start runs the binary until it is ready.
func start(t *testing.T, binary string, args ...string) *process {
	t.Helper()
	p := &process{T: t, cmd: exec.CommandContext(t.Context(), binary, append([]string{"--listen", "127.0.0.1:0"}, args...)...)}
	p.cmd.Stderr = &p.stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	address, found := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if !found {
		t.Fatalf("first line is %q, %v\n%s", line, err, p.stderr.String())
	}
	p.url = address
	p.until("ready", func() bool { code, _ := p.do("GET", "/health", ""); return code == 200 })
	return p
}

func (p *process) do(method, path, body string) (int, string) {
	req, err := http.NewRequestWithContext(p.Context(), method, p.url+path, strings.NewReader(body))
	if err != nil {
		p.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error()
	}
	return res.StatusCode, string(raw)
}

func (p *process) until(what string, ok func() bool) {
	p.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.Fatalf("not %s within 20 s", what)
		}
	}
}

func TestBinaryAnswersSamplesAndFinishesOnSIGTERM(t *testing.T) {
	p := start(t, build(t), "--delay", "300ms", "--slots", "4", "--allow-faults")

	var lines bytes.Buffer
	if err := samples([]string{"--count", "2"}, &lines); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{`"count":1`, `"language":"en"`} {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if code, body := p.do("POST", "/generate", line); code != 200 || !strings.Contains(body, want) {
			t.Errorf("sample %d: %d %s, want %s", i, code, body, want)
		}
	}

	// A call that goes on while the test looks at it.
	if code, body := p.do("POST", "/faults", `{"delay": "5s"}`); code != 200 {
		t.Fatalf("faults: %d %s", code, body)
	}
	answered := make(chan string, 1)
	go func() {
		_, body := p.do("POST", "/echo", `"late"`)
		answered <- body
	}()
	p.until("busy", func() bool { _, body := p.do("GET", "/health", ""); return strings.Contains(body, `"active_jobs":1`) })
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if body := <-answered; !strings.Contains(body, `"result":"late"`) {
		t.Errorf("the call that ran at SIGTERM got %q", body)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("exit: %v\n%s", err, p.stderr.String())
	}
}

func TestBinaryCrashesOnOrder(t *testing.T) {
	p := start(t, build(t), "--models", "echo", "--crash-after", "2")
	if code, body := p.do("POST", "/echo", `1`); code != 200 {
		t.Errorf("first call: %d %s", code, body)
	}
	if code, body := p.do("POST", "/echo", `1`); code != 0 {
		t.Errorf("second call was answered: %d %s", code, body)
	}
	if _ = p.cmd.Wait(); p.cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("exit code %d, want 3", p.cmd.ProcessState.ExitCode())
	}
}

func TestSamplesAreCallsWithinThePayloadLimit(t *testing.T) {
	const payloadBytesMax = 256 << 10
	var out bytes.Buffer
	if err := samples([]string{"--jsonl", "--count", "60"}, &out); err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for dec := json.NewDecoder(&out); dec.More(); {
		var line struct {
			Model   string
			Payload json.RawMessage
		}
		dec.DisallowUnknownFields()
		if err := dec.Decode(&line); err != nil {
			t.Fatal(err)
		}
		seen[line.Model]++
		if len(line.Payload) > payloadBytesMax/2 {
			t.Errorf("a %s payload has %d bytes", line.Model, len(line.Payload))
		}
	}
	if seen["faces"] != 30 || seen["language"] != 30 {
		t.Errorf("models %v", seen)
	}
}

func TestSamplesFillAFolder(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "samples")
	if err := samples([]string{"--out", folder, "--count", "4", "--expected"}, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"000.jpg", "001.txt", "002.jpg", "003.txt"} {
		if info, err := os.Stat(filepath.Join(folder, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	lines, err := os.ReadFile(filepath.Join(folder, "samples.jsonl"))
	if err != nil || bytes.Count(lines, []byte("\n")) != 4 || !bytes.Contains(lines, []byte(`"expected":{"language":"en"}`)) {
		t.Errorf("samples.jsonl: %v, %d bytes", err, len(lines))
	}
}

func TestBadFlagsSayWhatIsWrong(t *testing.T) {
	for args, want := range map[string]string{
		"serve --slots 0":                         "--slots",
		"serve --fail-rate 2":                     "fail_rate",
		"serve --async fuax":                      "fuax",
		"serve --listen 127.0.0.1:0 --models fog": "fog",
		"serve now":                               "now",
		"samples --count -1":                      "--count",
		"sample":                                  "sample",
	} {
		if err := command(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error about %s", args, err, want)
		}
	}
	if names := model.Names(); len(names) != 3 {
		t.Errorf("models %v", names)
	}
}
