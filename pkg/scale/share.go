package scale

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

const sharesHeadSQL = `
SELECT name, model, backend, target, policy, template, template_hash, cost, fill_order, mode, override, override_until,
       on_demand, desired, decided_at, order_id, ordered, ordered_at, applied_id, applied_at, existing, starting,
       seen_at, replace_before, failures, failed_at, retry_at, error, no_room_at, place, ready, registered, draining,
       created_at,
       EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.off' AND v.value = 'true') AS off,
       (SELECT coalesce(max(v.value::float8), 0) FROM penstock.setting v WHERE v.name = 'scale.max_all') AS max_all,
       (SELECT coalesce(max(v.value::float8), 0) FROM penstock.setting v WHERE v.name = 'scale.budget') AS budget
  FROM penstock.scale_share`

// sharesSQL reads all deployments, those of a model in the order in which they are filled, sharesOfSQL those of
// some models.
const (
	sharesSQL   = sharesHeadSQL + ` ORDER BY model, fill_order, cost, name`
	sharesOfSQL = sharesHeadSQL + ` WHERE model = ANY ($1) ORDER BY model, fill_order, cost, name`
)

// share is a row of penstock.scale_share: a deployment, and how far its backend is.
type share struct {
	Name          string
	Model         string
	Backend       string
	Target        []byte
	Policy        []byte
	Template      []byte
	TemplateHash  string
	Cost          float64
	FillOrder     int
	Mode          string
	Override      *int
	OverrideUntil *time.Time
	OnDemand      bool
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
	NoRoomAt      *time.Time // its backend had no room for one more
	Place         string     // of the instances of a backend that is bound to one, see Placed
	Ready         int
	Registered    int // instances that do not drain
	Draining      int
	CreatedAt     time.Time
	Off           bool // scaling is off everywhere
	MaxAll        float64
	Budget        float64 // of all deployments, in cost an hour; 0 for none

	policy Policy // read from Policy
	full   bool   // bounds and the budget have no room for one instance more than desired
}

// The backends that the leader drives. The others publish a number.
const (
	backendLocal      = "local"
	backendWebhook    = "webhook"
	backendKubernetes = "kubernetes"
	backendKEDA       = "keda"
)

// managed says whether the leader starts and stops the instances.
func (s share) managed() bool {
	return s.Backend == backendLocal || s.Backend == backendWebhook || s.Backend == backendKubernetes
}

// told says whether something asks for the number of the deployment: its backend, or KEDA.
func (s share) told() bool { return s.managed() || s.Backend == backendKEDA }

// lists says whether the backend reports its instances.
func (s share) lists() bool { return s.Backend == backendLocal || s.Backend == backendKubernetes }

// unregistered are the starts that have no row of an instance yet: those that the backend reported, and what
// it was told to start and has not reported. These began when the order grew: confirming it begins no start.
func (s share) unregistered() []time.Time {
	starts := slices.Clone(s.Starting)
	if s.AppliedAt == nil || s.OrderedAt == nil || !s.managed() {
		return starts
	}
	for range s.Ordered - s.Registered - s.Draining - len(s.Starting) {
		starts = append(starts, *s.OrderedAt)
	}
	return starts
}

// seenEvery is how old a report of a backend usually is at most.
const seenEvery = 5 * time.Second

// age is how old the last report of the backend is; 0 where none is expected.
func (s share) age(now time.Time) Seconds {
	switch {
	case !s.lists():
		return 0
	case s.SeenAt == nil:
		return Seconds(max(0, now.Sub(s.CreatedAt)))
	}
	return Seconds(max(0, now.Sub(*s.SeenAt)-seenEvery))
}

// Deployments at rest are asked what exists less often: something else may have started an instance.
const (
	restEvery = 10 * time.Second
	restMax   = 100 // in a round; more of them have to wait for the next ones
)

// rests says whether there is nothing to do for the deployment: it has no instance, is to have none, and its backend
// said so.
func (s share) rests() bool {
	none := s.Desired == 0 && s.Ordered == 0 && s.Registered == 0 && s.Draining == 0 && len(s.Starting) == 0 &&
		s.Existing != nil && *s.Existing == 0
	return none && s.Error == "" && s.AppliedID == s.OrderID && s.SeenAt != nil
}

// blockedAfter is how many failures in a row block a deployment until its next try.
const blockedAfter = 3

func (s share) blocked(now time.Time) bool {
	return s.Failures >= blockedAfter && s.RetryAt != nil && now.Before(*s.RetryAt)
}

func (s share) overridden(now time.Time) bool {
	return s.Override != nil && s.OverrideUntil != nil && now.Before(*s.OverrideUntil)
}

func (s *share) read() error {
	if err := json.Unmarshal(s.Policy, &s.policy); err != nil {
		return fmt.Errorf("read policy of deployment %q: %w", s.Name, err)
	}
	s.policy.Mode = Mode(s.Mode)
	if err := s.policy.Check(); err != nil {
		return fmt.Errorf("deployment %q: %w", s.Name, err)
	}
	return nil
}

// bounded notes which deployments may not have one instance more than desired, not even while they replace one.
func bounded(shares []share) {
	cost := 0.0
	for _, s := range shares {
		cost += float64(s.Desired) * s.Cost
	}
	for i := range shares {
		s := &shares[i]
		p := s.policy.WithDefaults()
		s.full = s.Budget > 0 && cost+s.Cost > s.Budget
		for _, most := range []int{p.Max, p.EmergencyMax, int(s.MaxAll)} {
			s.full = s.full || most > 0 && s.Desired >= most
		}
	}
}

// noRoomFor is how long a backend that had no room is not asked for one more instance than desired.
const noRoomFor = 10 * time.Minute

// noRoom says whether the backend had no room for one more lately.
func (s share) noRoom(now time.Time) bool {
	return s.NoRoomAt != nil && now.Sub(*s.NoRoomAt) < noRoomFor
}

// policyOf is the policy of a model: that of the deployment that is filled first, with the bounds of all.
// One deployment's mode is that of the model; several have modes of their own, see Spread.
func policyOf(shares []share) Policy {
	p := shares[0].policy.WithDefaults()
	for _, s := range shares[1:] {
		other := s.policy.WithDefaults()
		p.Min += other.Min
		p.Max = min(p.Max+other.Max, maxInstances)
		p.Floors = append(slices.Clone(p.Floors), other.Floors...)
	}
	if len(shares) > 1 {
		p.Mode = jointMode(shares)
	}
	return p
}

// jointMode is what several deployments permit together: full as soon as one of them may change.
func jointMode(shares []share) Mode {
	joint := Disabled
	for _, s := range shares {
		switch Mode(s.Mode) {
		case Full, UpOnly, Manual:
			return Full
		case Advise:
			joint = Advise
		}
	}
	return joint
}

// spread divides the number of a model among its deployments. Instances that nothing of ours started count
// as a part of it wherever the leader drives a backend.
func spread(n, unmanaged int, shares []share, now time.Time) map[string]int {
	if len(shares) == 1 && !shares[0].managed() {
		return map[string]int{shares[0].Name: n}
	}
	parts := make([]Share, 0, len(shares))
	for _, s := range shares {
		p := s.policy.WithDefaults()
		part := Share{
			Name: s.Name, Order: s.FillOrder, Cost: s.Cost, Min: p.Min, Max: p.Max, Mode: p.Mode,
			Current: s.Desired, Ready: s.Ready, Blocked: s.blocked(now),
		}
		switch {
		case len(shares) == 1: // its mode and override are in n already
			part.Mode = Full
			part.Max = max(part.Max, n)
			part.Min = 0
		case s.overridden(now):
			part.Mode, part.Current = Manual, *s.Override
		case part.Mode == Advise:
			part.Mode = Disabled
		}
		parts = append(parts, part)
	}
	return Spread(n-unmanaged, parts)
}

// affordable lowers the numbers of all deployments to the budget. Minimums are not taken away, nor is anything of a
// deployment that was not decided or may not change: its cost is a part of the budget.
func affordable(budget float64, wanted map[string]int, shares []share) map[string]int {
	claims := make([]Claim, 0, len(shares))
	for _, s := range shares {
		c := Claim{Name: s.Name, Cost: s.Cost, Current: s.Desired, Desired: s.Desired, Floor: s.Desired}
		if n, decided := wanted[s.Name]; decided {
			c.Desired, c.Floor = n, n
			if s.Mode != string(Disabled) && s.Mode != string(Advise) {
				c.Floor = min(n, s.policy.Min)
			}
		}
		claims = append(claims, c)
	}
	return Fit(budget, claims)
}

func sortTimes(times []time.Time) { slices.SortFunc(times, time.Time.Compare) }
