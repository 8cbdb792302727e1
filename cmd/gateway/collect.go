package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// collector collects garbage where the runtime would do so late: its next collection comes when the heap has grown
// fivefold. Streams allocate when they begin and end, and next to nothing between: without the collector those that
// have ended would keep memory for minutes, several times that of those that run.
type collector struct {
	last      heapReading // behind the last collection
	most      uint64      // goroutines at once since
	automatic uint64      // collections of the runtime by itself
	quiet     time.Time   // since when there was none of those
}

// heapReading is what the runtime says about its heap.
type heapReading struct {
	at         time.Time
	cycles     uint64 // collections so far
	automatic  uint64 // of those, the ones that the runtime began by itself
	allocated  uint64 // bytes since the start
	live       uint64 // bytes that the last collection has found in use
	size       uint64 // bytes of the heap that the system has not got back: objects in use, garbage, and free memory
	goroutines uint64 // each connection has one, and each request in flight another
}

// Bounds of collections.
const (
	collectEvery = 250 * time.Millisecond // at most
	// collectQuiet is for how long the runtime has collected nothing by itself before the collector begins. From then
	// on its collections keep the heap small, and the runtime may have no cause for one: the collector goes on, also
	// under load, until so much is allocated between two of its collections that the runtime comes first.
	collectQuiet = 5 * time.Second
	// A collection is of use where so much was allocated since the last one, or so many goroutines have ended.
	allocatedLeast = 1 << 20 // bytes
	allocatedPart  = 8       // and of the bytes in use, a part of this
	endedLeast     = 100
	endedPart      = 4 // and of the goroutines, a part of this
	// markRate bounds the CPU time of marking: 1 MiB in use takes some 0.7 ms. Stacks, sweeping and the page faults
	// of memory that is taken again come on top of that.
	markRate = 16 << 20 // bytes in use, a second
	// releaseMax bounds the heaps whose free memory is given back at once, during which one thread does nothing else:
	// a few ms. To larger ones the runtime itself does so, a little at a time.
	releaseMax = 32 << 20
)

// due says whether to collect now.
func (c *collector) due(now heapReading) bool {
	if now.automatic != c.automatic {
		c.automatic, c.quiet = now.automatic, now.at
	}
	if now.cycles != c.last.cycles {
		c.last, c.most = now, now.goroutines
	}
	c.most = max(c.most, now.goroutines)
	allocated, ended := now.allocated-c.last.allocated, c.most-now.goroutines
	passed := now.at.Sub(c.last.at)
	return now.at.Sub(c.quiet) >= collectQuiet && passed.Seconds()*markRate >= float64(now.live) &&
		(allocated >= max(allocatedLeast, now.live/allocatedPart) || ended >= max(endedLeast, c.most/endedPart))
}

// run collects until ctx ends.
func (c *collector) run(ctx context.Context) {
	ticks := time.NewTicker(collectEvery)
	defer ticks.Stop()
	c.quiet = time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		if now := readHeap(); c.due(now) {
			collect(now.size)
		}
	}
}

// collect collects garbage, and gives back to the system what is free of a heap that is not large.
func collect(size uint64) {
	if size > releaseMax {
		runtime.GC()
		return
	}
	debug.FreeOSMemory()
}

func readHeap() heapReading {
	s := []metrics.Sample{
		{Name: "/gc/cycles/total:gc-cycles"},
		{Name: "/gc/cycles/automatic:gc-cycles"},
		{Name: "/gc/heap/allocs:bytes"},
		{Name: "/gc/heap/live:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/sched/goroutines:goroutines"},
	}
	metrics.Read(s)
	n := func(i int) uint64 { return s[i].Value.Uint64() }
	return heapReading{
		at: time.Now(), cycles: n(0), automatic: n(1), allocated: n(2), live: n(3), size: n(4) + n(5), goroutines: n(6),
	}
}
