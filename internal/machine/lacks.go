package machine

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Lacks ends a test that needs a program which is not on this machine. The test is skipped, but for
// CI, where it fails: unless PENSTOCK_CI_WITHOUT, which .ci/run sets, names the program as one of
// those that it could not install.
func Lacks(t testing.TB, program, instead string) {
	t.Helper()
	without := strings.Fields(os.Getenv("PENSTOCK_CI_WITHOUT"))
	if os.Getenv("CI") == "true" && !slices.Contains(without, program) {
		t.Fatalf("needs %s: %s", program, instead)
	}
	t.Skipf("not run: needs %s: %s", program, instead)
}
