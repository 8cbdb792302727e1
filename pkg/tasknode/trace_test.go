package tasknode

import (
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

func TestTracingThatIsOffAllocatesNothing(t *testing.T) {
	n := New(Config{}, nil, nil)
	lock := &invalidation.Lock{Key: "#1", Token: 1, Entries: []invalidation.Entry{{ID: 1, Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}}
	j := &job{servedLane: servedLane{served: &servedQueue{name: "work"}}, lock: lock}
	runs := []*invalidation.Run{{Entry: lock.Entries[0], Lock: lock}}
	p := pile{endings: []invalidation.Ending{last(invalidation.Done(lock, 1, nil, 0))}, jobs: []*job{j}}
	ctx := t.Context()
	allocated := testing.AllocsPerRun(100, func() {
		j.traced = n.traceClaim("work", nil, j.lock.ClaimedAt).another()
		running, span := n.startRun(ctx, j, runs)
		if running != ctx {
			t.Error("the run has another context")
		}
		endRun(span, j, runs, nil)
		n.traceEndings(p, nil)
	})
	if allocated != 0 {
		t.Errorf("a run that nobody traces allocates %g times for it", allocated)
	}
}
