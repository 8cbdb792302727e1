package operator

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

func TestOfManyWhoMakeATokenOfOneNameOneSucceeds(t *testing.T) {
	d := New(pgtest.New(t))
	var wg sync.WaitGroup
	errs := make(chan error, 5)
	for range 5 {
		wg.Go(func() {
			_, err := d.CreateToken(t.Context(), Grant{Name: "ci", Scopes: []string{"push"}}, invalidation.By{Actor: "ada", Reason: "test"})
			errs <- err
		})
	}
	wg.Wait()
	close(errs)
	made := 0
	for err := range errs {
		if err == nil {
			made++
		} else if !errors.Is(err, invalidation.ErrState) {
			t.Error(err)
		}
	}
	if made != 1 {
		t.Errorf("%d tokens were made, want 1", made)
	}
}

func TestTokenNeedsAProperNameAndScopesThatExist(t *testing.T) {
	d := New(pgtest.New(t))
	by := invalidation.By{Actor: "ada", Reason: "test"}
	for _, g := range []Grant{
		{Name: "", Scopes: []string{"push"}},
		{Name: "autoscaler", Scopes: []string{"push"}}, // an actor of Penstock itself, by which drains end
		{Name: "recycle", Scopes: []string{"push"}},
		{Name: "expired", Scopes: []string{"push"}},
		{Name: "cron", Scopes: []string{"push"}},
		{Name: "a b", Scopes: []string{"push"}},
		{Name: strings.Repeat("x", 64), Scopes: []string{"push"}},
		{Name: "x"},
		{Name: "x", Scopes: []string{"root"}},
	} {
		if _, err := d.CreateToken(t.Context(), g, by); !errors.Is(err, invalidation.ErrInvalid) {
			t.Errorf("token %+v: %v, want it refused as invalid", g, err)
		}
	}
	if _, err := d.RotateToken(t.Context(), "nobody", time.Hour, time.Time{}, by); !errors.Is(err, invalidation.ErrNotFound) {
		t.Errorf("rotate what is not there: %v", err)
	}
	if err := d.RevokeToken(t.Context(), "nobody", by); !errors.Is(err, invalidation.ErrNotFound) {
		t.Errorf("revoke what is not there: %v", err)
	}
}

func TestSecretWithAnotherCharacterIsNotWellFormed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secret := []byte(NewSecret())
		if !WellFormed(string(secret)) {
			t.Fatalf("%s is not well-formed", secret)
		}
		at := rapid.IntRange(0, len(secret)-1).Draw(t, "at")
		other := rapid.SampledFrom([]byte("0123456789abcdefXYZ_")).Draw(t, "other")
		if was := secret[at]; was != other {
			secret[at] = other
			if WellFormed(string(secret)) {
				t.Fatalf("with %c in place of %c at %d it is well-formed", other, was, at)
			}
		}
	})
}
