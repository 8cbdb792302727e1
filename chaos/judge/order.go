package judge

import (
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// start is the first call of a pushed entry of a key.
type start struct {
	push  *Push
	first *Call
}

// keyStarts groups the pushes of keyed entries whose order is promised: told and due at once. An entry that ended
// otherwise than done without a call has no part in it: it was cancelled, or expired, or nodes died before they called.
func (x *index) keyStarts() map[[2]string][]start {
	keys := map[[2]string][]start{}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Key == "" || !p.Told || !p.Due.IsZero() || p.Effect {
			continue
		}
		var first *Call
		for _, c := range x.calls[p.Entry] {
			if first == nil || c.Begin.Before(first.Begin) {
				first = c
			}
		}
		if ends := x.endings[p.Entry]; first == nil && len(ends) > 0 && ends[0].Outcome != "done" {
			continue
		}
		at := [2]string{p.Queue, p.Key}
		keys[at] = append(keys[at], start{p, first})
	}
	return keys
}

func keysInOrder(x *index, r *report) {
	for key, starts := range x.keyStarts() {
		slices.SortFunc(starts, func(a, b start) int { return a.push.Called.Compare(b.push.Called) })
		for i, b := range starts {
			if b.first == nil {
				continue
			}
			for _, a := range starts[:i] {
				if !a.push.Returned.Before(b.push.Called) {
					continue
				}
				r.checked++
				if a.first == nil || a.first.Begin.After(b.first.Begin) {
					r.bad(
						"key %s of %s: entry %d was accepted before entry %d was pushed, and started after it",
						key[1],
						key[0],
						a.push.Entry,
						b.push.Entry,
					)
				}
			}
		}
		x.rerunsInOrder(key, starts, r)
	}
}

// rerunsInOrder looks at each call of a key under whose token nothing was recorded for its entry: the entry was handed
// back, or recovered, and has its place. Until it has ended, or is to be tried again later, no entry that was accepted
// after it runs under a later token before it is called again; nor under the same token if the worker was busy, and
// nothing kept the node from recording something else: it goes on before it hears that a record was refused. An entry
// with a deadline or a cancel may end without a call, and is left out.
func (x *index) rerunsInOrder(key [2]string, starts []start, r *report) {
	pushes, calls := map[int64]*Push{}, []*Call{}
	for _, s := range starts {
		pushes[s.push.Entry] = s.push
		calls = append(calls, x.calls[s.push.Entry]...)
	}
	slices.SortStableFunc(calls, func(a, b *Call) int { return a.Begin.Compare(b.Begin) })
	for i, c := range calls {
		a, g := pushes[c.Entry], x.grants[c.Token]
		if g == nil || x.forked(c.Begin) || a.Cancel != nil || !a.deadline().IsZero() || x.ended(c.Entry, c.Token) {
			continue
		}
		r.checked++
		for _, later := range calls[i+1:] {
			b := pushes[later.Entry]
			if b == a && later.Token >= c.Token {
				break
			}
			if !a.Returned.Before(b.Called) || x.forked(later.Begin) || !x.overtakes(c, later) {
				continue
			}
			r.bad("key %s of %s: entry %d was called under token %d, which recorded nothing of it, and entry %d, "+
				"which was accepted later, under token %d before it was called again", key[1], key[0], c.Entry,
				c.Token, later.Entry, later.Token)
			break
		}
	}
}

// ended says that something was recorded for an entry under a token: an end, or that it is to be tried again later.
func (x *index) ended(entry, token int64) bool {
	return slices.ContainsFunc(x.endings[entry], func(e *Ending) bool { return e.Token == token }) ||
		slices.ContainsFunc(x.setbacks[entry], func(s *Setback) bool { return s.Token == token })
}

// overtakes says that a later call of another entry of the key came before the entry of a call had its turn.
func (x *index) overtakes(c, later *Call) bool {
	was, is := x.grants[c.Token], x.grants[later.Token]
	switch {
	case is == nil || later.Token < c.Token: // a node goes on that has lost its lock
		return false
	case later.Token == c.Token:
		return c.Answer == "busy" && !x.disturbed(was.Process, c.Begin, later.Begin)
	}
	again := func(o *Call) bool {
		return o.Token > c.Token && o.Token <= later.Token && o.Begin.Before(later.Begin)
	}
	uncalled := !slices.ContainsFunc(x.calls[c.Entry], func(o *Call) bool { return o.Token == later.Token })
	lifts := func(seq, token int64) bool {
		return seq > was.Seq && (seq < is.Seq || uncalled && token == later.Token)
	}
	hadItsTurn := slices.ContainsFunc(x.calls[c.Entry], again) ||
		slices.ContainsFunc(x.endings[c.Entry], func(e *Ending) bool { return lifts(e.Seq, e.Token) }) ||
		slices.ContainsFunc(x.setbacks[c.Entry], func(s *Setback) bool { return lifts(s.Seq, s.Token) })
	return !hadItsTurn
}

// queueInput is an operation on the queue of one key: an entry is accepted, or the entry at its
// head starts.
type queueInput struct {
	push  bool
	entry int64
}

// fifoModel is a queue of entries of one key. An entry starts for the first time only from the
// head.
var fifoModel = porcupine.Model{
	Init: func() any { return []int64{} },
	Step: func(state, input, _ any) (bool, any) {
		queued, _ := state.([]int64)
		in, _ := input.(queueInput)
		if in.push {
			return true, append(slices.Clone(queued), in.entry)
		}
		if len(queued) == 0 || queued[0] != in.entry {
			return false, queued
		}
		return true, slices.Clone(queued[1:])
	},
	Equal: func(a, b any) bool {
		one, _ := a.([]int64)
		other, _ := b.([]int64)
		return slices.Equal(one, other)
	},
}

// Bounds of the search for a linearization. A window of a FIFO history is one as well: leaving
// elements out of a queue keeps the order of the others. So a long history is checked window by
// window.
const (
	windowPushes = 40
	windowTime   = 2 * time.Second
)

// linearizable searches, for each key, for one order of all acceptances and first starts that a
// queue could have had and that agrees with real time. A push lasts from its call to its answer, or
// to the first start of its entry. A first start is the moment at which the worker was called:
// entries of a key run one after another. A window for which the search takes too long is not
// counted as checked.
func linearizable(x *index, r *report) {
	for key, starts := range x.keyStarts() {
		starts = slices.DeleteFunc(starts, func(s start) bool { return s.first == nil })
		slices.SortFunc(starts, func(a, b start) int { return a.push.Called.Compare(b.push.Called) })
		for window := range slices.Chunk(starts, windowPushes) {
			switch porcupine.CheckOperationsTimeout(fifoModel, operations(window), windowTime) {
			case porcupine.Ok:
				r.checked++
			case porcupine.Illegal:
				r.checked++
				r.bad(
					"%d entries of key %s of %s from entry %d on started in no order that a queue could have had",
					len(window),
					key[1],
					key[0],
					window[0].push.Entry,
				)
			}
		}
	}
}

func operations(window []start) []porcupine.Operation {
	var history []porcupine.Operation
	for _, s := range window {
		began := s.first.Begin.UnixNano()
		history = append(
			history,
			porcupine.Operation{
				ClientId: len(history), Input: queueInput{true, s.push.Entry}, Call: s.push.Called.UnixNano(),
				Return: min(s.push.Returned.UnixNano(), began),
			},
			porcupine.Operation{
				ClientId: len(history) + 1,
				Input:    queueInput{false, s.push.Entry},
				Call:     began,
				Return:   began + 1,
			},
		)
	}
	return history
}
