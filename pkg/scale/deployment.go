package scale

import (
	"slices"
	"time"
)

const deploymentsHeadSQL = `
SELECT name, model, backend, target, policy, template, template_hash, cost, fill_order, mode, override,
       CASE WHEN isfinite(override_until) THEN override_until
            WHEN override_until > now() THEN '9999-01-01'
            WHEN override_until < now() THEN '1970-01-01' END AS override_until,
       desired, decided_at, order_id, ordered, ordered_at, applied_id, applied_at, existing, starting,
       seen_at, replace_before, failures, failed_at, retry_at, error, error_kind, no_room_at, place, ready, registered,
       draining, created_at, starts, removing, removing_since, unhealthy,
       clock_timestamp() AS at,
       EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true') AS off,
       (SELECT coalesce(max(v.value::float8), 0) FROM penstock.setting v WHERE v.name = 'scale.max_all') AS max_all,
       (SELECT coalesce(max(v.value::float8), 0) FROM penstock.setting v WHERE v.name = 'scale.budget') AS budget
  FROM penstock.scale_share`

// deploymentsSQL reads all deployments, those of a model in the order in which they are filled, deploymentsOfSQL those
// of some models.
const (
	deploymentsSQL   = deploymentsHeadSQL + ` ORDER BY model, fill_order, cost, name`
	deploymentsOfSQL = deploymentsHeadSQL + ` WHERE model = ANY ($1) ORDER BY model, fill_order, cost, name`
)

// errorKind is what an error of a deployment says about its instances. The message is for people alone.
type errorKind string

const (
	startError  errorKind = "start"   // an instance ended by itself
	noRoomError errorKind = "no room" // its backend had no room for one more
)

// deploymentRow is a row of penstock.scale_share: a deployment, and how far its backend is.
type deploymentRow struct {
	Name          string
	Model         string
	Backend       string
	Target        []byte
	Policy        []byte
	Template      []byte
	TemplateHash  string
	Cost          float64
	FillOrder     int
	Mode          Mode
	Override      *int
	OverrideUntil *time.Time
	Desired       int
	DecidedAt     *time.Time // nil: nothing is started or stopped yet
	OrderID       int64
	Ordered       int // instances that are to exist, with those that drain
	OrderedAt     *time.Time
	AppliedID     int64
	AppliedAt     *time.Time
	Existing      *int
	Starting      []time.Time // reported by the backend, and not registered
	SeenAt        *time.Time
	ReplaceBefore *time.Time
	Failures      int
	FailedAt      *time.Time
	RetryAt       *time.Time
	Error         string
	ErrorKind     errorKind
	NoRoomAt      *time.Time // its backend had no room for one more
	Place         string     // of the instances of a backend that is bound to one, see Placed
	Ready         int
	Registered    int // instances that do not drain
	Draining      int
	CreatedAt     time.Time
	NotReady      []time.Time          `db:"starts"` // when the starts began that are registered, and not ready yet
	Removing      []string             // instances that an order named for removal, and that are not gone
	RemovingSince map[string]time.Time // since when an order names each of these
	Unhealthy     map[string]time.Time // since when instances are, by name
	Off           bool                 // scaling is off everywhere
	MaxAll        float64
	Budget        float64   // of all deployments, in cost an hour; 0 for none
	At            time.Time // when the row was read

	// Of its reading.
	policy Policy   // read from Policy
	flaws  []string // of Policy
	ahead  bool     // a time in it was in the future, as after the clock was set back: it is to be written anew
}

// The backends that the leader drives. The others publish a number.
const (
	backendLocal      = "local"
	backendWebhook    = "webhook"
	backendKubernetes = "kubernetes"
	backendKEDA       = "keda"
)

// managed says whether the leader starts and stops the instances.
func (s deploymentRow) managed() bool {
	return s.Backend == backendLocal || s.Backend == backendWebhook || s.Backend == backendKubernetes
}

// told says whether something asks for the number of the deployment: its backend, or KEDA.
func (s deploymentRow) told() bool { return s.managed() || s.Backend == backendKEDA }

// lists says whether the backend reports its instances.
func (s deploymentRow) lists() bool {
	return s.Backend == backendLocal || s.Backend == backendKubernetes
}

// unregistered are the starts that have no row of an instance yet: those that the backend reported, and what
// it was told to start and has not reported. These began when the order grew, or when one that was there was found to
// be gone: confirming an order begins no start.
func (s deploymentRow) unregistered() []time.Time {
	starts := slices.Clone(s.Starting)
	if s.AppliedAt == nil || s.OrderedAt == nil || !s.managed() {
		return starts
	}
	has := s.Registered + s.Draining + len(s.Starting)
	if s.Existing != nil { // with those that cannot be registered, and those that have gone since the last round
		has = max(has, *s.Existing)
	}
	for range s.Ordered - has {
		starts = append(starts, *s.OrderedAt)
	}
	return starts
}

// underWay are all starts of the deployment, oldest first.
func (s deploymentRow) underWay() []time.Time {
	starts := slices.Concat(s.NotReady, s.unregistered())
	sortTimes(starts)
	return starts
}

// seenEvery is how old a report of a backend usually is at most.
const seenEvery = 5 * time.Second

// age is how old the last report of the backend is; 0 where none is expected.
func (s deploymentRow) age(now time.Time) Seconds {
	switch {
	case !s.lists():
		return 0
	case s.SeenAt == nil:
		return Seconds(max(0, now.Sub(s.CreatedAt)))
	}
	return Seconds(max(0, now.Sub(*s.SeenAt)-seenEvery))
}

// instancesAge is the age of the newest report of the backends that give one. A deployment whose own report is too old
// is held at its number, see shares; it holds up no other one of its model.
func instancesAge(deployments []deploymentRow, now time.Time) Seconds {
	newest := Seconds(-1)
	for _, s := range deployments {
		if age := s.age(now); s.lists() && (newest < 0 || age < newest) {
			newest = age
		}
	}
	return max(newest, 0)
}

// unknown says whether what exists of the deployment is not known, or not any more.
func (s deploymentRow) unknown(now time.Time) bool {
	return s.lists() && (s.SeenAt == nil || time.Duration(s.age(now)) > blindAfter)
}

// Deployments at rest are asked what exists less often: something else may have started an instance.
const (
	restEvery = 10 * time.Second
	restMax   = 100 // in a round; more of them have to wait for the next ones
)

// rests says whether there is nothing to do for the deployment: it has no instance, is to have none, and its backend
// said so.
func (s deploymentRow) rests() bool {
	none := s.Desired == 0 && s.Ordered == 0 && s.Registered == 0 && s.Draining == 0 && len(s.Starting) == 0 &&
		s.Existing != nil && *s.Existing == 0
	return none && s.Error == "" && s.AppliedID == s.OrderID && s.SeenAt != nil
}

// blockedAfter is how many failures in a row block a deployment until a try of it succeeds.
const blockedAfter = 3

func (s deploymentRow) failing() bool { return s.Failures >= blockedAfter }

// backsOff says whether starts failed lately, or had no room, and are not tried again now.
func (s deploymentRow) backsOff(now time.Time) bool {
	return s.RetryAt != nil && now.Before(*s.RetryAt)
}

// reported says whether the backend has reported its instances since an order failed or found no room: such an order
// may have begun a part of its starts.
func (s deploymentRow) reported() bool {
	since := func(at *time.Time) bool { return at == nil || s.SeenAt != nil && s.SeenAt.After(*at) }
	return !s.lists() || since(s.FailedAt) && since(s.NoRoomAt)
}

// stuckAfter is the age at which a start of the deployment is stuck.
func (s deploymentRow) stuckAfter(coldStartP95 float64) time.Duration {
	return stuckAfterOf(s.policy.WithDefaults(), coldStartP95)
}

// present are the instances that serve as far as is known without a report of the backend: those that are ready, and
// starts that are not stuck.
func (s deploymentRow) present(now time.Time, coldStartP95 float64) int {
	n := s.Ready
	for _, began := range s.underWay() {
		if now.Sub(began) <= s.stuckAfter(coldStartP95) {
			n++
		}
	}
	return n
}

// capped is the number within the emergency caps, which hold for overrides too. A cap of 0 is none.
func (s deploymentRow) capped(n int) int {
	for _, most := range []int{s.policy.EmergencyMax, int(s.MaxAll)} {
		if most > 0 {
			n = min(n, most)
		}
	}
	return n
}

func (s deploymentRow) overridden(now time.Time) bool {
	return s.Override != nil && s.OverrideUntil != nil && now.Before(*s.OverrideUntil)
}

// read reads the policy, as near as it is allowed, and has times of the row up to that of its reading.
func (s *deploymentRow) read() {
	s.policy, s.flaws = readPolicy(s.Policy)
	s.policy.Mode = s.Mode
	s.sane(s.At)
}

// removingMax is how long an instance that an order named for removal may take to go: a process or a pod that is asked
// to stop is killed long before. One that is there for longer is reported, and others do not wait for its room.
const removingMax = 5 * time.Minute

func (s deploymentRow) overdue(name string, now time.Time) bool {
	since, known := s.RemovingSince[name]
	return known && now.Sub(since) > removingMax
}

const (
	// noRoomFor is how long a backend that had no room is not asked for one more instance than desired, and for no
	// more than one at a time beyond those that it has.
	noRoomFor = 10 * time.Minute
	// noRoomRetry is how long it is asked for none.
	noRoomRetry = 15 * time.Second
	// freedRetry is that time while another deployment of the model gives up room.
	freedRetry = time.Second
)

// noRoom says whether the backend had no room for one more lately.
func (s deploymentRow) noRoom(now time.Time) bool {
	return s.NoRoomAt != nil && now.Sub(*s.NoRoomAt) < noRoomFor
}

// policyOf is the policy of a model: that of the deployment that is filled first, with the bounds of all.
// One deployment's mode is that of the model; several have modes of their own, see divide.
func policyOf(deployments []deploymentRow) Policy {
	p := deployments[0].policy.WithDefaults()
	for _, s := range deployments[1:] {
		other := s.policy.WithDefaults()
		p.Min += other.Min
		p.Max = min(p.Max+other.Max, maxInstances)
	}
	p.EmergencyMax = jointCap(deployments)
	if len(deployments) > 1 {
		p.Mode = jointMode(deployments)
	}
	return p
}

// jointCap is the sum of the emergency caps, or none where a deployment has none. shares keeps each
// one within its own.
func jointCap(deployments []deploymentRow) int {
	sum := 0
	for _, s := range deployments {
		if s.policy.EmergencyMax == 0 {
			return 0
		}
		sum += min(s.policy.EmergencyMax, maxInstances)
	}
	return sum
}

// jointMode is what several deployments permit together: full as soon as one of them may change.
func jointMode(deployments []deploymentRow) Mode {
	joint := Disabled
	for _, s := range deployments {
		switch s.Mode {
		case Full, UpOnly, Manual:
			return Full
		case Advise:
			joint = Advise
		}
	}
	return joint
}

// atMost is how many instances the deployment may have: its number, and where that is not known to be followed, all
// that were ordered, reported or registered.
func (s deploymentRow) atMost(now time.Time) int {
	if !s.unknown(now) {
		return s.Desired
	}
	n := max(s.Desired, s.Ordered, s.Registered+s.Draining)
	if s.Existing != nil {
		n = max(n, *s.Existing)
	}
	return n
}

func sortTimes(times []time.Time) { slices.SortFunc(times, time.Time.Compare) }
