package operator

import (
	"fmt"
	"testing"
)

// A node is read by its name or id, and not looked for in a list, which ends somewhere.
func TestANodeIsFoundBehindThoseOfAList(t *testing.T) {
	b := newBed(t)
	b.exec(fmt.Sprintf(`INSERT INTO penstock.node (id, name, application)
	                    SELECT n, coalesce('a' || nullif(n, 1), 'last'), 'default' FROM generate_series(1, %d) n`, PageMax+1))
	for _, wanted := range []string{"last", "1"} {
		if n, err := FindNode(t.Context(), b.d, wanted); err != nil || n.ID != 1 {
			t.Errorf("node %q is %+v (%v)", wanted, n, err)
		}
	}
}
