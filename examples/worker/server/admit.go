package server

import (
	"slices"
	"time"
)

// admit finds or starts the run of a call. created tells that this call started it.
// superseded is closed when a call with a higher token takes the run over.
func (s *Server) admit(c *call) (r *run, created bool, superseded <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.observe(c.caller); err != nil {
		return nil, false, nil, err
	}
	s.dropExpired()
	if r := s.byKey[c.key]; c.key != "" && r != nil {
		if c.token != 0 && c.token < r.token {
			return nil, false, nil, errStale
		}
		if c.print != r.print {
			return nil, false, nil, errReused
		}
		if r.accepts(c) {
			r.attach(c)
			return r, false, r.superseded, nil
		}
	}
	if err := s.room(c); err != nil {
		return nil, false, nil, err
	}
	r = newRun(c, s.faults.next())
	s.byID[r.id] = r
	if r.key != "" {
		s.byKey[r.key] = r
	}
	r.attach(c)
	s.live.Add(1)
	s.direct = append(s.direct, r)
	s.grantNext()
	go s.drive(r)
	return r, true, r.superseded, nil
}

// observe holds a caller's token against the highest seen. The caller holds mu.
func (s *Server) observe(c caller) error {
	if c.entry == "" || c.token == 0 {
		return nil
	}
	return s.fence.observe(c.entry, c.token)
}

// room tells why a call cannot start now. The caller holds mu.
func (s *Server) room(c *call) error {
	free := s.active < s.cfg.Slots && len(s.direct) == 0
	switch {
	case s.draining:
		return errDraining
	case c.hasDeadline && c.remaining <= 0:
		return errDeadline
	case c.dispatcher && (s.faults.refuses() || !free):
		return errBusy
	case !free && len(s.direct) >= s.cfg.DirectQueue:
		return errQueueFull
	}
	return nil
}

// grantNext gives free slots to those who wait, in the order they came. The caller holds mu.
func (s *Server) grantNext() {
	for s.active < s.cfg.Slots && len(s.direct) > 0 {
		r := s.direct[0]
		s.direct = slices.Delete(s.direct, 0, 1)
		s.active++
		r.state = running
		close(r.granted)
	}
}

// leaveQueue takes a run out that ended before it had a slot. The caller holds mu.
func (s *Server) leaveQueue(r *run) {
	if at := slices.Index(s.direct, r); at >= 0 {
		s.direct = slices.Delete(s.direct, at, at+1)
	}
}

// detach ends a synchronous call's interest; a run that nobody waits for any more is stopped.
func (s *Server) detach(r *run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.waiters--
	if r.waiters == 0 && !r.pinned && !r.ended() {
		r.cancel(errGone)
	}
}

// keep holds an ended asynchronous run for those who ask for its result. The caller holds mu.
func (s *Server) keep(r *run) {
	s.unfetched++
	s.kept = append(s.kept, r)
	s.dropExpired()
}

// dropExpired forgets results past their time or number. The caller holds mu.
func (s *Server) dropExpired() {
	for len(s.kept) > 0 && (len(s.kept) > s.cfg.KeepRuns || time.Since(s.kept[0].endedAt) > s.cfg.Keep) {
		s.markFetched(s.kept[0])
		s.forget(s.kept[0])
		s.kept = slices.Delete(s.kept, 0, 1)
	}
}

// markFetched notes that an ended run needs to be kept for nobody. The caller holds mu.
func (s *Server) markFetched(r *run) {
	if r.fetched {
		return
	}
	r.fetched = true
	s.unfetched--
	select {
	case s.fetchedOne <- struct{}{}:
	default:
	}
}

// forget removes a run from the indexes. The caller holds mu.
func (s *Server) forget(r *run) {
	delete(s.byID, r.id)
	if s.byKey[r.key] == r {
		delete(s.byKey, r.key)
	}
}
