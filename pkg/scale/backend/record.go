package backend

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// record is the file of an instance. It is written before its process is started: a record without a process is
// a start that failed, and a process of which the record does not know the id is found by its environment.
type record struct {
	Name         string    `json:"name"`
	Deployment   string    `json:"deployment"`
	Model        string    `json:"model"`
	TemplateHash string    `json:"template_hash,omitempty"`
	Endpoint     string    `json:"endpoint"`
	Slots        int       `json:"slots"`
	Device       string    `json:"device,omitempty"`
	Began        time.Time `json:"began"`
	PID          int       `json:"pid,omitempty"` // of the first process, and of its group
	Started      uint64    `json:"started,omitempty"`
	Boot         string    `json:"boot,omitempty"` // with Started tells it from a later process of that id
	Stopping     time.Time `json:"stopping,omitzero"`
}

func (l *Local) path(name string) string { return filepath.Join(l.cfg.Dir, name+".json") }

// write replaces a record in one step: a leader that dies leaves the old one or the new one.
func (l *Local) write(r record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write the record of %s: %w", r.Name, err)
	}
	fresh := l.path(r.Name) + ".new"
	if err := os.WriteFile(fresh, text, 0o600); err != nil {
		return fmt.Errorf("write the record of %s: %w", r.Name, err)
	}
	if err := os.Rename(fresh, l.path(r.Name)); err != nil {
		return fmt.Errorf("write the record of %s: %w", r.Name, err)
	}
	return nil
}

func (l *Local) records() ([]record, error) {
	entries, err := os.ReadDir(l.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("list records of local instances: %w", err)
	}
	var all []record
	for _, entry := range entries {
		if filepath.Ext(entry.Name()) != ".json" {
			continue
		}
		path := filepath.Join(l.cfg.Dir, entry.Name())
		text, err := os.ReadFile(path) //nolint:gosec // a record of ours
		if err != nil {
			return nil, fmt.Errorf("read the record of a local instance: %w", err)
		}
		var r record
		if err := json.Unmarshal(text, &r); err != nil {
			return nil, fmt.Errorf("read the record %s: %w", path, err)
		}
		all = append(all, r)
	}
	return all, nil
}

// forget removes the record of an instance of which no process is left.
func (l *Local) forget(name string) error {
	if err := os.Remove(l.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget local instance: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.ended, name)
	delete(l.seen, name)
	return nil
}
