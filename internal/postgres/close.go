package postgres

import (
	"sync"
	"time"
)

// closeMax bounds the wait for the connections of pools at the end of a program.
const closeMax = time.Second

// Close calls the functions that close pools, all at once, and waits for them at most a second in all. A database that
// does not answer holds up the end of connections whose statement was cancelled, by 15 s and more each: the system ends
// those that are left with the process.
func Close(pools ...func()) {
	var open sync.WaitGroup
	for _, end := range pools {
		open.Go(end)
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		open.Wait()
	}()
	select {
	case <-closed:
	case <-time.After(closeMax):
	}
}
