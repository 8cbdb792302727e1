package replay

import (
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/fairness"
)

const sample = `gmt_create,predict_type,predict_status,exec_time_seconds,groupId,checkpoint_model_version_id
2024-11-15 16:57:50,TXT_2_IMG,SUCCEED,32.0,G0000,M0000
2024-11-15 16:58:50,TXT_2_IMG,PENDING,,G0001,M0001
2024-11-15 16:59:50,TXT_2_IMG,SUCCEED,8,G0002,M0001
`

func TestTraceIsReadByTheNamesOfItsColumns(t *testing.T) {
	trace, err := Read(strings.NewReader(sample))
	if err != nil || len(trace) != 2 || trace[1] != (Request{120, "G0002", "M0001", 8}) {
		t.Fatalf("trace is %v (%v)", trace, err)
	}
	Squeeze(trace, 2, 0.5)
	if trace[1].At != 40 {
		t.Errorf("40 s of service on 2 half busy slots take %v s, want 40", trace[1].At)
	}
	if _, err := Read(strings.NewReader("a,b\n1,2\n")); err == nil {
		t.Error("another file is taken for a trace")
	}
}

// Fair queues take from nobody who has little, and neither order leaves a slot idle while work waits.
func TestLightTenantsWaitLessInFairQueues(t *testing.T) {
	trace := Made(3000, 7)
	Squeeze(trace, 8, 0.95)
	c := Config{Nodes: 2, Slots: 4, Every: 1, Seed: 7}
	var reports [2]Report
	for i, a := range []fairness.Algorithm{fairness.Fifo, fairness.Fair} {
		c.Algorithm = a
		o := Run(trace, c)
		reports[i] = Judge(trace, c, o)
		if reports[i].Missed > 1e-6 {
			t.Errorf("%.1f slot-seconds were idle while work waited", reports[i].Missed)
		}
		for k, w := range o.Waits {
			if w < 0 || (a == fairness.Fifo && k > 0 && o.Began[k] < o.Began[k-1]) {
				t.Fatalf("request %d waited %v s, or began before its forerunner in a fifo queue", k, w)
			}
		}
	}
	fifo, fair := reports[0], reports[1]
	light := len(fair.Classes) - 2
	if fair.Classes[light].P95 > fifo.Classes[light].P95/2 || fair.Served < fifo.Served || fair.Attained < fifo.Attained {
		t.Errorf("fair: %+v\nfifo: %+v", fair, fifo)
	}
}
