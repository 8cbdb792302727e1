package maintenance

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

// A file system that hangs keeps the brake from no other measurement, and what it answers later counts.
func TestAFileSystemThatHangsHoldsUpNoOtherMeasurement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, answer := 0, make(chan float64)
		b := NewBrake(&frozen{}, nil, Config{Brake: BrakeConfig{Disk: func() (float64, error) {
			asked++
			return <-answer, nil
		}}}, func() Sampling { return Sampling{} })
		began := time.Now()
		for range 3 {
			if m := b.measure(t.Context()); !m.noDisk {
				t.Errorf("%+v without an answer", m)
			}
		}
		if took := time.Since(began); took > 3*waitMax {
			t.Errorf("three passes waited %v", took)
		}
		answer <- 0.97
		synctest.Wait()
		if m := b.measure(t.Context()); m.noDisk || m.disk != 0.97 || asked != 1 {
			t.Errorf("%+v after the answer to question %d", m, asked)
		}
	})
}

// A measurement that goes on failing refuses no push: its errors go on as well, for the alert on them.
func TestTheErrorsOfAMeasurementThatGoesOnFailingAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs duty.Errors
		b := NewBrake(&frozen{}, nil, Config{
			Log:   errs.Log("brake", slog.New(slog.DiscardHandler)),
			Brake: BrakeConfig{Disk: func() (float64, error) { return 0, errors.New("no such device") }},
		}, func() Sampling { return Sampling{} })
		for range 10 * 30 {
			b.measure(t.Context())
			time.Sleep(2 * time.Second)
		}
		if n := errs.Counts()["brake"]; n != 300 {
			t.Errorf("%d errors in ten minutes, want that of each pass: 300", n)
		}
	})
}

// A database that does not tell its size delays no measurement of the disk.
func TestADatabaseThatHangsDelaysNoDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, database := 0, &frozen{}
		b := NewBrake(database, nil, Config{Brake: BrakeConfig{
			DatabaseBytesMax: 1,
			Disk: func() (float64, error) {
				asked++
				return 0.97, nil
			},
		}}, func() Sampling { return Sampling{} })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		began := time.Now()
		for range 30 {
			if m := b.measure(ctx); !m.noBytes || m.noDisk || m.disk != 0.97 {
				t.Fatalf("%+v, want the disk alone", m)
			}
		}
		if took := time.Since(began); took > 30*waitMax || asked != 30 {
			t.Errorf("the disk was measured %d times in %v, want 30 in as many seconds", asked, took)
		}
		if n := database.asked.Load(); n > 2 {
			t.Errorf("the database was asked %d times in %v, want once in %v", n, time.Since(began), measureMax+sizeEvery)
		}
	})
}

// A refusal ends with the measurement that it is of, whether the other one succeeds or not.
func TestARefusalEndsWithItsMeasurement(t *testing.T) {
	const max = 100
	b := NewBrake(&frozen{}, nil, Config{Brake: BrakeConfig{DatabaseBytesMax: max}}, func() Sampling { return Sampling{} })
	for _, c := range []struct {
		of   string
		m    storageUse
		want string // none, stays, or the measurement
	}{
		{"disk", storageUse{disk: 0.5, bytes: 50}, "none"},
		{"disk", storageUse{noDisk: true, bytes: 50}, "stays"},
		{"disk", storageUse{noDisk: true, bytes: 97}, "stays"}, // else it would end with the database
		{"disk", storageUse{disk: 0.5, bytes: 97}, "database"},
		{"disk", storageUse{disk: 0.5, bytes: 93}, "none"},
		{"disk", storageUse{disk: 0.5, noBytes: true}, "none"},
		{"disk", storageUse{disk: 0.93, noBytes: true}, "disk"},
		{"database", storageUse{noDisk: true, bytes: 50}, "none"},
		{"database", storageUse{disk: 0.5, noBytes: true}, "stays"},
		{"database", storageUse{disk: 0.97, noBytes: true}, "stays"},
		{"database", storageUse{disk: 0.93, bytes: 50}, "none"},
		{"database", storageUse{disk: 0.93, bytes: 93}, "database"},
		{"", storageUse{noDisk: true, bytes: 50}, "stays"}, // a refusal of a version before names none
		{"", storageUse{disk: 0.5, bytes: 50}, "none"},
	} {
		got := "none"
		if r, known := b.judge(brakedQueue{Held: "storage", Of: c.of}, c.m); !known {
			got = "stays"
		} else if r != nil {
			got = r.Of
		}
		if got != c.want {
			t.Errorf("a refusal of %q at %+v: %s, want %s", c.of, c.m, got, c.want)
		}
	}
}

// A database that is slow to tell its size is judged by the size before, and one that fails is not asked in each pass.
func TestTheSizeOfAMomentAgoServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &frozen{}
		b := NewBrake(db, nil, Config{Brake: BrakeConfig{DatabaseBytesMax: 100}}, func() Sampling { return Sampling{} })
		bytes := int64(97)
		b.bytes, b.sized = &bytes, time.Now()
		known := func() bool { return !b.measure(t.Context()).noBytes }
		if !known() {
			t.Error("the size of a moment ago is forgotten while the database does not answer")
		}
		time.Sleep(sizeEvery + measureMax)
		synctest.Wait()
		if known() {
			t.Error("a size of long ago counts")
		}
		asked := db.asked.Load()
		for range 5 {
			known()
			time.Sleep(time.Second)
		}
		if n := db.asked.Load(); n != asked {
			t.Errorf("a database that failed was asked %d times in the next seconds", n-asked)
		}
	})
}

// A new leader counts no queue before its first sampling could have ended, unless the queue is refused.
func TestANewLeaderWaitsForItsFirstSampling(t *testing.T) {
	b := NewBrake(&frozen{}, nil, Config{Brake: BrakeConfig{QueueEntriesMax: 1}}, func() Sampling { return Sampling{} })
	if b.old(brakedQueue{}, time.Time{}, 0) {
		t.Error("a queue without a sample is counted at once")
	}
	if !b.old(brakedQueue{Held: "depth"}, time.Time{}, 0) {
		t.Error("a refused queue waits for a sampling")
	}
	b.began = time.Now().Add(-time.Minute)
	if !b.old(brakedQueue{}, time.Time{}, 0) {
		t.Error("a queue without a sample is not counted after a minute")
	}
}
