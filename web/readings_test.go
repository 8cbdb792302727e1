package web

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// A change is on every page within a beat and the time of a read, whenever it happens and however late in its beat the
// reading before began.
func TestAChangeIsReadWithinABeat(t *testing.T) {
	for _, taken := range []time.Duration{0, 20 * time.Millisecond, 100 * time.Millisecond} {
		for changed := 3 * time.Second; changed < 4*time.Second; changed += 37 * time.Millisecond {
			synctest.Test(t, func(t *testing.T) {
				d := &Dashboard{reads: newReadings(time.Minute)}
				begin := time.Now()
				read := func() int {
					v, err := cached(t.Context(), d, "value", beat, func(context.Context) (int, error) {
						v := 0
						if time.Since(begin) >= changed {
							v = 1
						}
						time.Sleep(taken)
						return v, nil
					})
					if err != nil {
						t.Fatal(err)
					}
					return v
				}
				time.Sleep(changed % beat) // the stream begins at any time in a beat
				for read() == 0 {
					time.Sleep(untilBeat(time.Now()))
				}
				if late := time.Since(begin) - changed; late > beat+taken {
					t.Errorf("a change at %s is read %s later, with reads of %s", changed, late, taken)
				}
			})
		}
	}
}

// A database that needs long for a read is asked less often.
func TestSlowReadsAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &Dashboard{reads: newReadings(time.Minute)}
		var busy time.Duration
		begin := time.Now()
		for time.Since(begin) < time.Minute {
			_, err := cached(t.Context(), d, "value", beat, func(context.Context) (int, error) {
				time.Sleep(1500 * time.Millisecond)
				busy += 1500 * time.Millisecond
				return 0, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(untilBeat(time.Now()))
		}
		if share := busy.Seconds() / time.Since(begin).Seconds(); share > 0.26 {
			t.Errorf("reads take %.0f %% of the time", share*100)
		}
	})
}

// What was used last is kept, up to a bound of its bytes.
func TestReadingsAreBoundedByTheirBytes(t *testing.T) {
	t.Parallel()
	d := &Dashboard{reads: newReadings(time.Minute)}
	reads := map[string]int{}
	draw := func(key string) {
		_, err := kept(t.Context(), d, key, time.Hour, func(context.Context) (*snapshot, error) {
			reads[key]++
			return &snapshot{part: make([]byte, readingsBytes/10)}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	draw("first")
	for i := range 30 {
		draw(fmt.Sprint("page ", i))
		draw("first")
	}
	bytes := int64(0)
	for _, r := range d.reads.kept {
		if page, is := r.value.(*snapshot); is {
			bytes += int64(len(page.part))
		}
	}
	if bytes > readingsBytes || bytes < readingsBytes/2 || reads["first"] != 1 {
		t.Errorf("%d bytes are kept, at most %d wanted; the page in use was made %d times", bytes, readingsBytes, reads["first"])
	}
}

// Entries that are done are counted by the samples of the leader, which come every few seconds.
func TestNothingIsCalledDoneBeforeTheFirstSample(t *testing.T) {
	t.Parallel()
	before := stateFlow("/ui/", nil, trends{}, 0, nil, nil)
	if before.DoneNote != "no samples yet" {
		t.Errorf("without a sample the count of done entries is explained by %q", before.DoneNote)
	}
	first := time.Unix(0, 0)
	point := operator.TrendPoint{Queue: "work", At: first.Add(trendOver), Failed: 3, Gone: 203}
	open := gather([]operator.TrendPoint{point}, first)
	if after := stateFlow("/ui/", nil, open, 3, nil, nil); after.DoneNote != "or cancelled, 15 min" || after.Done.Count != 200 {
		t.Errorf("203 entries left in a step that is not over, 3 of them failed: done %d, %q", after.Done.Count, after.DoneNote)
	}
}

// An estimate that grows by itself is no failure, nor is a queue that comes with the next sample.
func TestFailuresAreThoseThatWereCounted(t *testing.T) {
	t.Parallel()
	first := time.Unix(0, 0)
	var points []operator.TrendPoint
	add := func(queue string, step int, failed int64) {
		points = append(points, operator.TrendPoint{Queue: queue, At: first.Add(time.Duration(step) * trendStep), Failed: failed})
	}
	add("deep", 0, 50_000)
	add("deep", 2, 52_000) // an autoanalyze
	add("late", 1, 400)
	add("late", 3, 403)
	if n := gather(points, first).failures(); n != 3 {
		t.Errorf("%d failures, want 3", n)
	}
}
