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

// keyStarts groups the pushes of keyed entries whose order is promised: told, due at once and never
// cancelled.
func (x *index) keyStarts() map[[2]string][]start {
	keys := map[[2]string][]start{}
	for i := range x.Pushes {
		p := &x.Pushes[i]
		if p.Key == "" || !p.Told || !p.Due.IsZero() || p.Cancel != nil || p.Effect {
			continue
		}
		var first *Call
		for _, c := range x.calls[p.Entry] {
			if first == nil || c.Begin.Before(first.Begin) {
				first = c
			}
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
	}
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
