package judge

import (
	"slices"
	"strconv"
)

// newestToken looks at each end that a node recorded: with a result under its own token, which is the newest of the
// key, and with an error as the holder of the lock.
func newestToken(x *index, r *report) {
	for i := range x.Endings {
		e := &x.Endings[i]
		if e.Token == 0 {
			continue
		}
		r.checked++
		key := e.Key
		if key == "" {
			key = "#" + strconv.FormatInt(e.Entry, 10)
		}
		var newest *Grant
		for _, g := range x.byKey[[2]string{e.Queue, key}] {
			if g.Seq < e.Seq && (newest == nil || g.Seq > newest.Seq) {
				newest = g
			}
		}
		switch {
		case newest == nil:
			r.bad("entry %d ended under token %d, and its key %s was never granted", e.Entry, e.Token, key)
		case newest.Token != e.Token:
			r.bad("entry %d ended under token %d after token %d was granted", e.Entry, e.Token, newest.Token)
		}
	}
	x.setbacksAreTheHolders(r)
}

// setbacksAreTheHolders looks at each error that was noted for an entry, and names a node and no token: that node held
// the lock which covered the entry then. Where workers run the entries, one of them was called under the token of that
// lock, but for an entry that fails since it is unknown whether it ran.
func (x *index) setbacksAreTheHolders(r *report) {
	for i := range x.Setbacks {
		s := &x.Setbacks[i]
		if s.Node == 0 {
			continue
		}
		r.checked++
		p := x.pushByEntry[s.Entry]
		uncalled := s.Class == classPoison || s.Class == classUnknown && (p == nil || p.Once)
		called := slices.ContainsFunc(x.calls[s.Entry], func(c *Call) bool { return c.Token == s.Token })
		switch {
		case s.Token == 0:
			r.bad("an error of entry %d was recorded by node %d, and no lock covered the entry", s.Entry, s.Node)
		case s.Node != s.Holder:
			r.bad("an error of entry %d was recorded by node %d, and node %d had it under token %d", s.Entry, s.Node,
				s.Holder, s.Token)
		case !called && !uncalled && slices.Contains(x.Served, s.Queue):
			r.bad("an error of entry %d was recorded under token %d, and no worker was called under it", s.Entry,
				s.Token)
		}
	}
}
