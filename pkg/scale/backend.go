package scale

import (
	"context"
	"encoding/json"
	"errors"
	"time"
)

// Backend starts and stops the instances of deployments. It is called outside transactions, by one leader at
// a time and for one deployment at a time; a leader that lost its term may be late with its last call.
type Backend interface {
	// List returns the instances that exist, those that another leader started among them. It returns an
	// error wrapping ErrUnlisted where the backend cannot know; any other error means that the number is
	// unknown, and never that there is none.
	List(ctx context.Context, d BackendTarget) ([]BackendInstance, error)

	// Apply brings an order about, or begins to. Applying it again does nothing more. It stops no instance
	// but those that the order names. An error is retried by the caller, later each time, and no sooner than its
	// method RetryAfter says where it has one. One that wraps ErrCarriedOut is shown and not retried.
	Apply(ctx context.Context, o Order) error
}

// ErrUnlisted is returned by a backend that cannot list instances: they register themselves.
var ErrUnlisted = errors.New("the backend does not list instances")

// ErrNoRoom is returned by Apply where all devices or places for instances are in use. A template change then
// replaces instances without one more.
var ErrNoRoom = errors.New("there is no room for one more instance")

// ErrCarriedOut counts as success, with a notice: Apply did what it could, and something keeps it from doing so as it
// should, such as a right that is missing.
var ErrCarriedOut = errors.New("the order was carried out in another way")

// Watcher is a backend that learns by itself when the instances of a deployment change.
type Watcher interface {
	// Watch follows the instances of the deployments that are listed, until ctx ends. It calls
	// changed with the model of a deployment whose instances changed, or may have: changed does not
	// block. List may answer from the state that Watch keeps.
	Watch(ctx context.Context, changed func(model string))
}

// Placed is a backend whose instances exist in one place, such as the processes of a machine.
type Placed interface {
	// Place names where this leader's instances are. A leader of another place finds none of them.
	Place() (string, error)
}

// ErrElsewhere is noted where the instances of a deployment are in another place than this leader.
var ErrElsewhere = errors.New("its instances are in another place")

// ErrNotOwned is returned where something else changes the number of the target: an autoscaler of the
// cluster, or another deployment.
var ErrNotOwned = errors.New("the target belongs to another autoscaler")

// BackendTarget is the part of a deployment that its backend needs.
type BackendTarget struct {
	Name         string
	Model        string
	Target       json.RawMessage // by which the backend finds it
	Template     json.RawMessage // of its instances; null for none
	TemplateHash string
}

// Order is the desired state of the instances of a deployment.
type Order struct {
	BackendTarget
	ID      int64    // grows with each change of the order, also after a deployment was made again
	Count   int      // instances that are to exist, those that drain included
	Current int      // instances that exist as far as is known
	Remove  []string // of those that exist: no request runs there, and none will
	Reason  string
}

// starts says whether more instances are to exist than are left.
func (o Order) starts() bool { return o.Count > o.Current-len(o.Remove) }

// BackendState is how far an instance is for its backend. Whether it takes requests is for probes to tell.
type BackendState string

// The states.
const (
	InstanceRunning BackendState = "running" // or starting
	InstanceFailed  BackendState = "failed"  // it ended, or cannot start; it is to be removed
	InstanceEnding  BackendState = "ending"  // its stop is under way
)

// BackendInstance is an instance that a backend has, registered or not.
type BackendInstance struct {
	Name         string    // unique in its model: it is registered under it
	Endpoint     string    // empty: not known yet
	Slots        int       // requests that it runs at a time
	Began        time.Time // of its start
	State        BackendState
	TemplateHash string // that it was started with; empty: not known
	Message      string // of a failure

	// Revision is the backend's own version of its template. While instances have several, the backend replaces them
	// by itself, with more than were ordered for a time. Empty: it never does.
	Revision string
}
