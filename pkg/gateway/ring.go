package gateway

import (
	"strings"
	"sync"
	"time"
)

// RequestRecord is the history of one request.
type RequestRecord struct {
	ID          string    `json:"id"`
	Model       string    `json:"model"`
	Flow        string    `json:"flow"`
	Criticality string    `json:"criticality"`
	Token       string    `json:"token"`
	EndedAt     time.Time `json:"ended_at"`
	Status      int       `json:"status"`
	Attempts    int       `json:"attempts"`
	QueueMS     float64   `json:"queue_ms"`
	TookMS      float64   `json:"took_ms"` // from arrival to the end of the answer
	In, Out     int64     `json:"-"`
	Server      string    `json:"server"`
	Error       string    `json:"error,omitempty"`
	Fault       string    `json:"fault,omitempty"` // of the worker in the last attempt, see faultCut; empty: none
	Trace       Trace     `json:"trace"`           // of the last attempt
}

// keptErrorMax bounds the error of a request that is kept, in bytes: errors quote what clients send.
const keptErrorMax = 1 << 10

// ring keeps the last requests.
type ring struct {
	mu   sync.Mutex
	last []RequestRecord
	n    int
}

func newRing(size int) *ring { return &ring{last: make([]RequestRecord, 0, size)} }

func (r *ring) add(e RequestRecord) {
	if len(e.Error) > keptErrorMax {
		e.Error = strings.Clone(ClipText(e.Error, keptErrorMax))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if cap(r.last) == 0 {
		return
	}
	if len(r.last) < cap(r.last) {
		r.last = append(r.last, e)
	} else {
		r.last[r.n%len(r.last)] = e
	}
	r.n++
}

// find returns the newest request of an id.
func (r *ring) find(id string) (RequestRecord, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range len(r.last) {
		at := (r.n - 1 - i + len(r.last)) % len(r.last)
		if r.last[at].ID == id {
			return r.last[at], true
		}
	}
	return RequestRecord{}, false
}
