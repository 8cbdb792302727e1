package gateway

import (
	"time"

	"github.com/penstock/penstock/pkg/slot"
)

// droppedSlots has the slots that pools have dropped, and that a comparison must not bring back. The value is since
// when the database knows it, zero while it has not been told. A slot that comes again has another token.
type droppedSlots map[slot.Held]time.Time

func (d droppedSlots) add(slots ...slot.Held) {
	for _, s := range slots {
		d[s] = time.Time{}
	}
}

// reported notes that the database knows of slots.
func (d droppedSlots) reported(slots ...slot.Held) {
	for _, s := range slots {
		d[s] = time.Now()
	}
}

// forget drops slots that are in their pools again.
func (d droppedSlots) forget(slots ...slot.Held) {
	for _, s := range slots {
		delete(d, s)
	}
}

// without returns those of some slots that no pool has dropped.
func (d droppedSlots) without(slots []slot.Held) (rest []slot.Held) {
	for _, s := range slots {
		if _, gone := d[s]; !gone {
			rest = append(rest, s)
		}
	}
	return rest
}

// forgetBefore drops what the database knew before a comparison that begins now.
func (d droppedSlots) forgetBefore(now time.Time) {
	for s, at := range d {
		if !at.IsZero() && at.Before(now) {
			delete(d, s)
		}
	}
}
