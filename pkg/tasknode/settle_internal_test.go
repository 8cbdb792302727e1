package tasknode

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Endings go together as long as a message holds them: one of 1 GB would be refused, and sent again for ever.
func TestEndingsOfATransactionFitIntoAMessage(t *testing.T) {
	large := json.RawMessage(`"` + strings.Repeat("a", 10<<20) + `"`)
	done := func(result json.RawMessage) invalidation.Ending {
		return invalidation.Done(&invalidation.Lock{}, 1, result, 0)
	}
	var small, mixed []invalidation.Ending
	for range 2 * settleMax {
		small = append(small, done(nil))
	}
	for range 10 {
		mixed = append(mixed, done(large))
	}
	for _, c := range []struct {
		name    string
		endings []invalidation.Ending
		want    int
	}{
		{"none", nil, 0},
		{"few", small[:7], 7},
		{"many", small, settleMax},
		{"large", mixed, 3},
		{"one that is larger alone", []invalidation.Ending{done(json.RawMessage(strings.Repeat("a", settleBytesMax+1))), done(nil)}, 1},
	} {
		if got := fitting(c.endings); got != c.want {
			t.Errorf("%s: %d of %d go together, want %d", c.name, got, len(c.endings), c.want)
		}
	}
}
