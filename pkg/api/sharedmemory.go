package api

import (
	"fmt"
	"sync"
)

// sharedMemory is how many bytes requests together may hold. Those of one holder, which is a token or the workers that
// report, have half of it at most, so that one client leaves room for the others.
type sharedMemory struct {
	perHolder int64

	mu   sync.Mutex
	free int64
	of   map[string]int64 // taken, by holder
}

// workers is the holder of the reports of workers, which have no token. No token has this name.
const workers = "reports of workers"

func newSharedMemory(bytes int64) *sharedMemory {
	return &sharedMemory{perHolder: bytes / 2, free: bytes, of: map[string]int64{}}
}

// holder is the name of the caller's token; empty where no token is needed, and callers cannot be told apart.
func (c caller) holder() string {
	if c.secret == "" {
		return ""
	}
	return c.Name
}

func (b *sharedMemory) take(holder string, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case n > b.free:
		return errBusy
	case holder == "":
	case b.of[holder]+n > b.perHolder:
		return fmt.Errorf("%w: the requests of this client hold as much memory as those of one client may", errBusy)
	default:
		b.of[holder] += n
	}
	b.free -= n
	return nil
}

func (b *sharedMemory) give(holder string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free += n
	if holder == "" {
		return
	}
	b.of[holder] -= n
	if b.of[holder] == 0 {
		delete(b.of, holder)
	}
}
