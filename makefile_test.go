package penstock_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Between them make race and make plain test each package once.
func TestRaceAndPlainHaveAllPackages(t *testing.T) {
	divided := map[string][]string{}
	for line := range strings.Lines(output(t, "make", "--no-print-directory", "divide", "TESTS=./...")) {
		fields := strings.Fields(line)
		divided[fields[0]] = fields[1:]
	}
	for _, path := range strings.Fields(output(t, "go", "list", "./...")) {
		folder := "." + strings.TrimPrefix(path, module)
		raced, plain := slices.Contains(divided["raced"], folder), slices.Contains(divided["plain"], folder)
		if folder != "./e2e" && raced == plain {
			t.Errorf("make race has %s: %t, make plain has it: %t", folder, raced, plain)
		}
	}
	for _, folder := range []string{"./pkg/gateway", "./pkg/inference", "./pkg/invalidation", "./pkg/tasknode", "./internal/duty"} {
		if !slices.Contains(divided["raced"], folder) {
			t.Errorf("%s is not raced", folder)
		}
	}
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), name, args...)
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return string(out)
}
