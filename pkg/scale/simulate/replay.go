package simulate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// Minute is the recorded load of a model in a minute.
type Minute struct {
	Minute  time.Time
	Arrived float64 // requests
	Calls   int64   // that ended
	Busy    float64 // slot-seconds that they took
	Desired int
	Ready   int
}

// Replay is the course of a policy under recorded arrivals.
type Replay struct {
	Score    Score         // of the policy
	Recorded float64       // instance-hours that were recorded: the largest number of ready instances of each minute
	Minutes  []ReplayPoint // one for each recorded minute
}

// ReplayPoint is a minute of a replay. Numbers of instances are the largest of the minute.
type ReplayPoint struct {
	Minute   time.Time `json:"minute"`
	Arrived  float64   `json:"arrived"`
	Desired  int       `json:"desired"`  // by the policy
	Recorded int       `json:"recorded"` // as it was decided then
}

// Bounds of a replay: its requests, the slots of all instances, and the product of both, which bounds its time.
const (
	replayMax      = 2_000_000
	replaySlotsMax = 20_000
	replayWorkMax  = 1_000_000_000
)

// ErrReplay wraps errors about minutes that cannot be replayed.
var ErrReplay = errors.New("minutes cannot be replayed")

// ErrBusy is returned by Enter: a policy is being played.
var ErrBusy = errors.New("another policy is being played here; try again")

// enterWait is how long Enter waits for its turn.
const enterWait = 2 * time.Second

// playing holds one while a policy is played.
var playing = make(chan struct{}, 1)

// Enter waits for its turn to play policies, which the caller ends: a policy takes a core for up to some seconds, and
// memory for each request. The pages and the API of a process share it.
func Enter(ctx context.Context) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, enterWait)
	defer cancel()
	select {
	case playing <- struct{}{}:
		return func() { <-playing }, nil
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, ctx.Err()
		}
		return nil, ErrBusy
	}
}

// Again plays recorded minutes against a policy, until ctx ends. The arrivals of a minute are spread evenly over it,
// and each takes the mean service time of its minute, or the one known last. Cold is the seconds that a start takes.
// The fleet begins with the ready instances of the first minute.
func Again(ctx context.Context, minutes []Minute, policy scale.Policy, cold time.Duration) (Replay, error) {
	if len(minutes) == 0 {
		return Replay{}, fmt.Errorf("%w: none is recorded", ErrReplay)
	}
	minutes = slices.Clone(minutes)
	slices.SortFunc(minutes, func(a, b Minute) int { return a.Minute.Compare(b.Minute) })
	policy = policy.WithDefaults()
	slots := policy.Slots * policy.Max
	if policy.Slots > replaySlotsMax || slots > replaySlotsMax {
		return Replay{}, fmt.Errorf("%w: max times slots is above %d", ErrReplay, replaySlotsMax)
	}
	first := minutes[0].Minute
	load := Load{
		Slots: policy.Slots, Max: policy.Max, SLO: time.Duration(policy.SLO).Seconds(), Cold: cold.Seconds(),
	}
	service := meanService(minutes)
	var replay Replay
	ready := 0 // instance-minutes
	for _, m := range minutes {
		if m.Calls > 0 {
			service = m.Busy / float64(m.Calls)
		}
		begin := m.Minute.Sub(first).Seconds()
		n := int(m.Arrived + 0.5)
		if most := min(replayMax, replayWorkMax/slots); len(load.Requests)+n > most {
			return Replay{}, fmt.Errorf("%w: more than %d requests: choose a shorter time", ErrReplay, most)
		}
		for i := range n {
			at := begin + 60*(float64(i)+0.5)/float64(n)
			load.Requests = append(load.Requests, Request{At: at, Service: service})
		}
		ready += m.Ready
		replay.Minutes = append(replay.Minutes,
			ReplayPoint{Minute: m.Minute, Arrived: m.Arrived, Recorded: m.Desired})
	}
	replay.Recorded = float64(ready) / 60
	end := minutes[len(minutes)-1].Minute.Sub(first).Seconds() + 60
	load.Tail = max(0, end-load.Span())
	recorder := &recorder{scaler: NewDecider(policy), origin: moment(0), most: map[int]int{}}
	var err error
	if replay.Score, err = run(ctx, load, Faults{}, recorder, min(minutes[0].Ready, policy.Max)); err != nil {
		return Replay{}, err
	}
	for i, m := range minutes {
		replay.Minutes[i].Desired = recorder.most[int(m.Minute.Sub(first)/time.Minute)]
	}
	return replay, nil
}

// meanService is the mean over all minutes, a second where no call ended.
func meanService(minutes []Minute) float64 {
	calls, busy := 0.0, 0.0
	for _, m := range minutes {
		calls += float64(m.Calls)
		busy += m.Busy
	}
	if calls == 0 {
		return 1
	}
	return busy / calls
}

// recorder keeps the largest number of each minute.
type recorder struct {
	scaler Scaler
	origin time.Time
	most   map[int]int
}

// Desired implements Scaler.
func (r *recorder) Desired(now time.Time, o scale.Obs) int {
	n := r.scaler.Desired(now, o)
	minute := int(now.Sub(r.origin) / time.Minute)
	r.most[minute] = max(r.most[minute], n)
	return n
}
