package inference

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"

	"pgregory.net/rapid"
)

var (
	ok       = worker.Outcome{Kind: worker.Done}
	boom     = worker.Outcome{Kind: worker.Failed, Class: worker.ClassTransient, Reason: "boom"}
	refused  = worker.Outcome{Kind: worker.NotReady, Reason: "connection refused"}
	noCUDA   = worker.Outcome{Kind: worker.Failed, Class: worker.ClassContextLost, Reason: "illegal memory access"}
	tooBig   = worker.Outcome{Kind: worker.Failed, Class: worker.ClassOOM}
	badInput = worker.Outcome{Kind: worker.Rejected, Class: worker.ClassInput}
)

const fast, slow = 50 * time.Millisecond, 30 * time.Second

// record records a call of an entry of its own, of one of two flows.
func record(b *breaker, now time.Time, instance string, o worker.Outcome, ran time.Duration) verdict {
	recorded++
	c := b.instances[instance]
	return b.Record(now, instance, o, evidence{
		entry: fmt.Sprint(recorded), flow: fmt.Sprint(recorded % 2), ran: ran, probe: c != nil && c.probing,
	})
}

var recorded int

func clock() time.Time { return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC) }

func TestFastFailuresOnOneInstanceQuarantineIt(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for range 5 {
		record(b, now, "good", ok, slow)
	}
	spent := 0
	for i := range 3 {
		if !admits(b, now, "bad") {
			t.Fatalf("quarantined after %d failures, want 3", i)
		}
		v := record(b, now, "bad", boom, fast)
		if !v.Unspent {
			spent++
		}
		if v.Quarantined != (i == 2) {
			t.Errorf("failure %d: quarantined is %t", i+1, v.Quarantined)
		}
	}
	if spent > 0 {
		t.Errorf("%d attempts were spent on a broken instance, want none", spent)
	}
	if admits(b, now, "bad") || !admits(b, now, "good") {
		t.Error("want bad refused and good admitted")
	}
	if _, reason, quarantined := b.Quarantine(now, "bad"); !quarantined || reason != "fast failures: boom" {
		t.Errorf("reason is %q", reason)
	}
}

func TestOneProbeCallBringsAnInstanceBack(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for range 5 {
		record(b, now, "bad", refused, fast)
	}
	now = now.Add(15 * time.Second)
	if !admits(b, now, "bad") {
		t.Fatal("no probe call after the quarantine")
	}
	if admits(b, now, "bad") {
		t.Error("a second call was admitted beside the probe")
	}
	b.Forgo("bad")
	if !admits(b, now, "bad") {
		t.Error("an unused probe was not given back")
	}
	if v := record(b, now, "bad", refused, fast); !v.Unspent {
		t.Error("the probe call spent an attempt")
	}
	if admits(b, now.Add(29*time.Second), "bad") {
		t.Error("a failed probe did not double the quarantine")
	}
	now = now.Add(30 * time.Second)
	if !admits(b, now, "bad") {
		t.Fatal("no second probe call")
	}
	record(b, now, "bad", ok, slow)
	for range 2 {
		if !admits(b, now, "bad") {
			t.Error("a successful probe did not end the quarantine")
		}
	}
	if v := record(b, now, "bad", boom, fast); v.Quarantined || v.Unspent {
		t.Error("old failures were held against the instance after its recovery")
	}
}

func TestFaultOfTheEntriesQuarantinesNobody(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for i := range 100 {
		for _, instance := range []string{"a", "b", "c"} {
			v := record(b, now, instance, boom, fast)
			if v.Quarantined && i > 5 {
				t.Fatalf("%s quarantined although all fail alike", instance)
			}
		}
		now = now.Add(100 * time.Millisecond)
	}
	quarantined := 0
	for _, instance := range []string{"a", "b", "c"} {
		if !admits(b, now, instance) {
			quarantined++
		}
	}
	if quarantined > 0 {
		t.Errorf("%d of 3 instances quarantined, want none", quarantined)
	}
}

// One entry can say that a device is gone; that a second one finds it so, after a quarantine, is proof.
func TestContextLossQuarantinesAtOnceAndRecyclesWhenItLasts(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	v := record(b, now, "bad", noCUDA, slow)
	if !v.Quarantined || v.Recycle || !v.Unspent || admits(b, now, "bad") {
		t.Errorf("got %+v", v)
	}
	now = now.Add(15 * time.Second)
	if !admits(b, now, "bad") {
		t.Fatal("no probe call")
	}
	if v := record(b, now, "bad", noCUDA, slow); !v.Recycle || !v.Unspent {
		t.Errorf("got %+v", v)
	}
}

func TestLastUsableInstanceIsNotQuarantinedOnTheEvidenceOfOneFlow(t *testing.T) {
	for name, o := range map[string]worker.Outcome{"context": noCUDA, "fast": boom} {
		b, now := newBreaker(usualTuning().quarantine), clock()
		for i := range 20 {
			v := b.Record(now, "only", o, evidence{entry: fmt.Sprint(i), flow: "one", ran: fast, last: true})
			if v.Quarantined || (i >= 3 && !v.Suspicious) {
				t.Fatalf("%s, failure %d: %+v", name, i, v)
			}
		}
		if v := b.Record(now, "only", o, evidence{entry: "x", flow: "another", ran: fast, last: true}); !v.Quarantined {
			t.Errorf("%s: two flows are not enough: %+v", name, v)
		}
	}
}

func TestRetriesOfOneEntryAreOneWitness(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for range 20 {
		if v := b.Record(now, "i", boom, evidence{entry: "7", ran: fast}); v.Quarantined {
			t.Fatal("quarantined by one entry")
		}
	}
}

func TestHangingInstanceIsQuarantined(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	timeout := worker.Outcome{Kind: worker.Unknown, Err: worker.ErrRunLimit, MaybeRunning: true}
	record(b, now, "good", ok, slow)
	if v := record(b, now, "bad", timeout, slow); v.Quarantined {
		t.Error("quarantined by one slow call")
	}
	if v := record(b, now, "bad", timeout, slow); !v.Quarantined {
		t.Error("not quarantined after two calls that hung")
	}
	record(b, now, "busy", ok, slow)
	for range 5 { // others succeed there meanwhile: the limit is the entry's
		if v := record(b, now.Add(time.Second), "busy", timeout, slow); v.Quarantined {
			t.Error("quarantined although calls succeed there")
		}
	}
}

func TestLoadingIsNoFailure(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for range 20 {
		if v := record(b, now, "i", worker.Outcome{Kind: worker.NotReady, Starting: true}, fast); v.Quarantined {
			t.Fatal("quarantined while it loads")
		}
	}
}

// A server that is down behind its proxy answers sooner than the others.
func TestInstanceThatItsProxyDoesNotReachIsQuarantined(t *testing.T) {
	now := clock()
	for _, status := range []int{502, 408, 303} {
		b := newBreaker(usualTuning().quarantine)
		lost := worker.Outcome{Kind: worker.Unknown, StatusCode: status}
		for range 10 {
			record(b, now, "slow", lost, slow)
			record(b, now, "down", lost, fast)
		}
		if admits(b, now, "down") || !admits(b, now, "slow") {
			t.Errorf("%d: down is admitted: %v; slow: %v", status, admits(b, now, "down"), admits(b, now, "slow"))
		}
	}
}

func TestWhatSaysNothingAboutAnInstance(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for range 100 {
		record(b, now, "i", tooBig, fast)
		record(b, now, "i", badInput, fast)
		record(b, now, "i", worker.Outcome{Kind: worker.Busy}, fast)
		record(b, now, "i", worker.Outcome{Kind: worker.Cancelled}, fast)
		record(b, now, "i", worker.Outcome{Kind: worker.Unknown}, fast)
		record(b, now, "i", boom, slow)
	}
	if !admits(b, now, "i") {
		t.Error("quarantined without a fast failure")
	}
}

func TestFailuresLongApartDoNotAddUp(t *testing.T) {
	b, now := newBreaker(usualTuning().quarantine), clock()
	for range 50 {
		record(b, now, "i", boom, fast)
		now = now.Add(20 * time.Second)
	}
	if !admits(b, now, "i") {
		t.Error("3 failures a minute quarantined an instance")
	}
}

// Calls that began before a quarantine may end while its probe is out. None of them ends the quarantine, makes it longer,
// or lets a second probe go.
func TestCallsFromBeforeAQuarantineAreNoProbe(t *testing.T) {
	for name, o := range map[string]worker.Outcome{"done": ok, "failed": boom, "busy": {Kind: worker.Busy}} {
		b, now := newBreaker(usualTuning().quarantine), clock()
		b.Condemn(now, "i", "ill")
		now = now.Add(15 * time.Second)
		if admitted, probe := b.Admit(now, "i"); !admitted || !probe {
			t.Fatal("no probe call after the quarantine")
		}
		b.Record(now, "i", o, evidence{entry: "old", ran: fast})
		if admitted, _ := b.Admit(now, "i"); admitted {
			t.Errorf("%s: a call beside the probe was admitted", name)
		}
		b.Record(now, "i", boom, evidence{entry: "probe", ran: fast, probe: true})
		if until, _, _ := b.Quarantine(now, "i"); !until.Equal(now.Add(30 * time.Second)) {
			t.Errorf("%s: after a failed probe the quarantine lasts until %v, want 30 s", name, until)
		}
	}
}

// Whatever happens: a quarantine is bounded, at most one probe is out, and an
// instance that succeeds is never refused.
func TestBreakerProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := usualTuning().quarantine
		b, now := newBreaker(config), clock()
		names := []string{"a", "b"}
		probes := map[string]int{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			name := rapid.SampledFrom(names).Draw(t, "instance")
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "pause")))
			until, _, quarantined := b.Quarantine(now, name)
			if quarantined && until.Sub(now) > config.lastsMax {
				t.Fatalf("%s quarantined for %s", name, until.Sub(now))
			}
			if !admits(b, now, name) {
				continue
			}
			if quarantined {
				t.Fatalf("%s admitted during its quarantine", name)
			}
			if c := b.instances[name]; c != nil && c.probing {
				probes[name]++
				if admits(b, now, name) {
					t.Fatalf("%s admitted two probes", name)
				}
			}
			o := rapid.SampledFrom([]worker.Outcome{ok, boom, refused, noCUDA, tooBig, {Kind: worker.Busy}}).Draw(t, "outcome")
			record(b, now, name, o, fast)
			if o.Kind == worker.Done && !admits(b, now, name) {
				t.Fatalf("%s refused right after a success", name)
			}
			b.Forgo(name)
		}
	})
}

// admits says whether a call may go to the instance, as a probe or not.
func admits(b *breaker, now time.Time, instance string) bool {
	admitted, _ := b.Admit(now, instance)
	return admitted
}
