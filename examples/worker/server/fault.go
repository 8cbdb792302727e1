package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
)

// Faults are what tests want to go wrong. Rates are shares of the calls, 0..1.
type Faults struct {
	Delay       Duration `json:"delay"`        // every run takes this much longer
	DelayJitter Duration `json:"delay_jitter"` // plus up to this much
	FailRate    float64  `json:"fail_rate"`    // runs that end in an error
	BusyRate    float64  `json:"busy_rate"`    // dispatcher calls answered 503 although a slot is free
	HangRate    float64  `json:"hang_rate"`    // runs that never end by themselves
	// calls that are carried out but whose connection breaks before the answer
	DropRate   float64  `json:"drop_rate"`
	CrashAfter int      `json:"crash_after"` // the process exits in the middle of this run, counted from now; 0: never
	SlowStart  Duration `json:"slow_start"`  // not ready for this long from now
}

// Duration is a time.Duration that reads and writes as text, like "250ms".
type Duration time.Duration

// MarshalText writes the duration as Go does.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalJSON reads a string that time.ParseDuration reads.
func (d *Duration) UnmarshalJSON(raw []byte) error {
	var text string
	err := json.Unmarshal(raw, &text)
	if err == nil {
		var parsed time.Duration
		parsed, err = time.ParseDuration(text)
		*d = Duration(parsed)
	}
	if err != nil {
		// This type of error is the one to which encoding/json adds the field's name.
		return &json.UnmarshalTypeError{Value: string(raw), Type: reflect.TypeFor[Duration]()}
	}
	return nil
}

// Validate says which field is out of range.
func (f Faults) Validate() error {
	rates := map[string]float64{
		"fail_rate": f.FailRate, "busy_rate": f.BusyRate, "hang_rate": f.HangRate,
		"drop_rate": f.DropRate,
	}
	for name, rate := range rates {
		if !(rate >= 0 && rate <= 1) {
			return &model.InputError{Field: name, Reason: fmt.Sprintf("must be between 0 and 1, is %v", rate)}
		}
	}
	for name, d := range map[string]Duration{
		"delay": f.Delay, "delay_jitter": f.DelayJitter,
		"slow_start": f.SlowStart,
	} {
		if d < 0 {
			return &model.InputError{Field: name, Reason: "must not be negative"}
		}
	}
	if f.CrashAfter < 0 {
		return &model.InputError{Field: "crash_after", Reason: "must not be negative"}
	}
	return nil
}

var errInjected = errors.New("injected failure")

// faultLine rolls the dice. Runs and refusals have dice of their own, each rolled a fixed number of
// times a call, so that the n-th run meets the same fate whatever else happened.
type faultLine struct {
	mu      sync.Mutex
	faults  Faults // CrashAfter counts down; SlowStart is in readyAt
	readyAt time.Time
	runDice *rand.Rand
	busy    *rand.Rand
}

func newFaultLine(f Faults, seed uint64) *faultLine {
	return &faultLine{
		faults:  f,
		readyAt: time.Now().Add(time.Duration(f.SlowStart)),
		runDice: rand.New(rand.NewPCG(seed, 1)),
		busy:    rand.New(rand.NewPCG(seed, 2)),
	}
}

// change lets edit alter the faults as they are now, with what is left of the crash count and the
// slow start, and returns the outcome. Nothing changes where edit or the outcome is in error.
func (l *faultLine) change(edit func(*Faults) error) (Faults, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.faults
	f.SlowStart = Duration(max(0, time.Until(l.readyAt)))
	if err := edit(&f); err != nil {
		return l.faults, err
	}
	if err := f.Validate(); err != nil {
		return l.faults, err
	}
	l.faults, l.readyAt = f, time.Now().Add(time.Duration(f.SlowStart))
	return f, nil
}

func (l *faultLine) starting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Before(l.readyAt)
}

func (l *faultLine) refuses() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.busy.Float64() < l.faults.BusyRate
}

// fate is what will happen to one run.
type fate struct {
	delay                   time.Duration
	fail, hang, drop, crash bool
}

func (l *faultLine) next() fate {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.faults
	l.faults.CrashAfter = max(0, f.CrashAfter-1)
	jitter, fail, hang, drop := l.runDice.Float64(), l.runDice.Float64(), l.runDice.Float64(), l.runDice.Float64()
	return fate{
		delay: time.Duration(f.Delay) + time.Duration(jitter*float64(f.DelayJitter)),
		fail:  fail < f.FailRate,
		hang:  hang < f.HangRate,
		drop:  drop < f.DropRate,
		crash: f.CrashAfter == 1,
	}
}
