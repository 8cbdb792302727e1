package server

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
)

// Server answers calls for the models it was given. Until SetModels it is not ready.
type Server struct {
	cfg        Config
	faults     *faultLine
	live       sync.WaitGroup // runs that have not ended
	fetchedOne chan struct{}  // hints Drain that a result was fetched

	mu        sync.Mutex
	models    map[string]model.Model
	draining  bool
	active    int    // slots in use
	direct    []*run // direct callers' runs that wait for a slot, oldest first
	byID      map[string]*run
	byKey     map[string]*run
	kept      []*run // ended asynchronous runs, oldest first
	unfetched int    // of kept
	completed int    // runs since the start
	failed    int
	fence     *fence
}

// New makes a server. The error says which of the faults is out of range.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Faults.Validate(); err != nil {
		return nil, err
	}
	return &Server{
		cfg:        cfg,
		faults:     newFaultLine(cfg.Faults, cfg.Seed),
		fetchedOne: make(chan struct{}, 1),
		byID:       map[string]*run{},
		byKey:      map[string]*run{},
		fence:      newFence(cfg.FenceEntries),
	}, nil
}

// SetModels makes the server ready to run these models.
func (s *Server) SetModels(models []model.Model) {
	byName := make(map[string]model.Model, len(models))
	for _, m := range models {
		byName[m.Name()] = m
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.models = byName
}

// Handler routes the protocol.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", s.serveChat)
	mux.HandleFunc("POST /generate", func(w http.ResponseWriter, r *http.Request) { s.serveCall(w, r, "") })
	mux.HandleFunc("POST /{model}", func(w http.ResponseWriter,
		r *http.Request,
	) {
		s.serveCall(w, r, r.PathValue("model"))
	})
	mux.HandleFunc("GET /status/{id}", s.serveStatus)
	mux.HandleFunc("POST /cancel/{id}", s.serveCancel)
	mux.HandleFunc("GET /health", s.serveHealth)
	mux.HandleFunc("GET /faults", s.serveFaults)
	mux.HandleFunc("POST /faults", s.changeFaults)
	mux.HandleFunc("DELETE /faults", s.clearFaults)
	return mux
}

// Drain takes no new calls, waits until all runs have ended, then a little for results that nobody
// has fetched. When ctx ends first, it stops the runs and returns ctx's error.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()

	idle := make(chan struct{})
	go func() {
		s.live.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-ctx.Done():
		s.stopAll()
		<-idle
		return ctx.Err()
	}
	return s.waitFetched(ctx)
}

func (s *Server) stopAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.byID {
		r.cancel(errDraining)
	}
}

func (s *Server) waitFetched(ctx context.Context) error {
	linger := time.After(s.cfg.Linger)
	for {
		s.mu.Lock()
		left := s.unfetched
		s.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-s.fetchedOne:
		case <-linger:
			s.cfg.Log.Warn("results were never fetched", "count", left)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Server) modelNamed(name string) (model.Model, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.models[name]
	return m, ok
}

func (s *Server) modelNames() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make([]string, 0, len(s.models))
	for name := range s.models {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// notReady tells why calls cannot be taken, or nil.
func (s *Server) notReady() error {
	s.mu.Lock()
	draining, loaded := s.draining, s.models != nil
	s.mu.Unlock()
	switch {
	case draining:
		return errDraining
	case !loaded || s.faults.starting():
		return errStarting
	}
	return nil
}
