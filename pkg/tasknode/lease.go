package tasknode

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// lease knows when it was renewed last, on the monotonic clock of this process.
type lease struct {
	mu sync.Mutex
	at time.Time
}

func (l *lease) renew(start time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if start.After(l.at) {
		l.at = start
	}
}

func (l *lease) renewed() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

// newIncarnation is a random positive number. 63 bits make it certain enough that no two starts share one.
func newIncarnation() int64 {
	var b [8]byte
	rand.Read(b[:]) // never returns an error
	return int64(binary.BigEndian.Uint64(b[:])>>1) | 1
}

func (n *Node) id() invalidation.NodeID { return invalidation.NodeID(n.incarnation.Load()) }
