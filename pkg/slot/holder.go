package slot

import (
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Holder is a node that holds slots. Callers bound the time of each statement by its context.
type Holder struct {
	DB   postgres.DB
	Node func() invalidation.NodeID // the node's incarnation, which may change
}

// Held names a slot that a node holds: a number at an instance, and the token under which the node holds it.
type Held struct {
	Instance, Number int32
	Token            int64
}

// Holding is slots that a node holds, and until when it may use them.
type Holding struct {
	Slots []Held
	Until time.Time // zero: the answer did not say
}

// columns are the names of slots as the arrays of a statement.
func columns(slots []Held) (instances, numbers []int32, tokens []int64) {
	for _, s := range slots {
		instances, numbers, tokens = append(instances, s.Instance), append(numbers, s.Number), append(tokens, s.Token)
	}
	return instances, numbers, tokens
}
