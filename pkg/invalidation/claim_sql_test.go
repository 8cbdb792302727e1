package invalidation

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the statements of a claim to testdata")

// The statements of a claim are rendered from templates. The texts that run are in testdata, to be read and reviewed;
// `go test ./pkg/invalidation -run TestRenderedClaims -update` writes them.
func TestRenderedClaimsAreThoseInTestdata(t *testing.T) {
	for name, sql := range map[string]string{
		"claim_one_lane":             claimTexts.oneLane,
		"claim_delete_first":         claimTexts.deleteFirst,
		"claim_delete_first_limited": claimTexts.deleteFirstLimited,
		"claim_lock_first":           claimTexts.lockFirst,
		"claim_lock_first_limited":   claimTexts.lockFirstLimited,
		"claim_lock_first_keyed":     claimTexts.lockFirstKeyed,
		"claim_weighed":              claimTexts.weighed,
		"claim_weighed_keyed":        claimTexts.weighedKeyed,
	} {
		file := filepath.Join("testdata", name+".sql")
		if *update {
			if err := os.WriteFile(file, []byte(sql[1:]+"\n"), 0o644); err != nil { //nolint:gosec // for everyone to read
				t.Fatal(err)
			}
		}
		golden, err := os.ReadFile(file) //nolint:gosec // one of those above
		if err != nil {
			t.Fatal(err)
		}
		if string(golden) != sql[1:]+"\n" {
			t.Errorf("%s differs from the statement that runs; write it with -update and read the difference", file)
		}
	}
}
