package workertest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// StartProcess runs a server that prints "listening on URL" and returns the URL
// and a function that kills it.
func StartProcess(t *testing.T, name string, args ...string) (url string, kill func()) {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), name, args...) // killed below, when the test is over
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed; how it ended says nothing
	})
	t.Cleanup(kill)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	url, found := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if !found {
		t.Fatalf("first line is %q, %v", line, err)
	}
	return url, kill
}

//go:embed testdata
var servers embed.FS

// NPMInstall puts the packages that a server of testdata locks into the user's cache, once, and
// returns a directory with them and the server's script. Where they cannot be had the test is
// reported as not run.
func NPMInstall(t *testing.T, server string, unneeded ...string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("not run: -short")
	}
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("not run: %s is not installed", tool)
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("not run: no cache directory: %v", err)
	}
	source := path.Join("testdata", server)
	lock := readFile(t, path.Join(source, "package-lock.json"))
	sum := sha256.Sum256(lock)
	packages := filepath.Join(cache, "penstock", server+"-"+hex.EncodeToString(sum[:6]))
	if _, err := os.Stat(packages); err != nil {
		fill := packages + ".partial-" + filepath.Base(t.TempDir()) + hex.EncodeToString(sum[6:9])
		defer os.RemoveAll(fill)
		copyFile(t, path.Join(source, "package.json"), filepath.Join(fill, "package.json"))
		copyFile(t, path.Join(source, "package-lock.json"), filepath.Join(fill, "package-lock.json"))
		cmd := exec.CommandContext(t.Context(), "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
		cmd.Dir = fill
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Skipf("not run: npm packages cannot be installed: %v\n%s", err, output)
		}
		for _, part := range unneeded {
			_ = os.RemoveAll(filepath.Join(fill, "node_modules", part)) // only disk space
		}
		if err := os.Rename(fill, packages); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(packages, "node_modules"), filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	copyFile(t, path.Join(source, "server.mjs"), filepath.Join(dir, "server.mjs"))
	return dir
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	text, err := servers.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, readFile(t, from), 0o600); err != nil {
		t.Fatal(err)
	}
}

// ForeignRuntimes are the parts of onnxruntime-node that this machine cannot load.
func ForeignRuntimes() []string {
	unneeded := []string{"onnxruntime-web"}
	for node, system := range map[string]string{"linux": "linux", "darwin": "darwin", "win32": "windows"} {
		if system != runtime.GOOS {
			unneeded = append(unneeded, "onnxruntime-node/bin/napi-v6/"+node)
		}
	}
	return unneeded
}
