package main

import (
	"fmt"

	"github.com/shirou/gopsutil/v3/disk"

	"github.com/penstock/penstock/pkg/maintenance"
)

// Brake is the section that says when pushes are refused because there is nearly no room. Entries that wait are run
// meanwhile.
type Brake struct {
	DatabaseBytes int64   `koanf:"database_bytes_max" help:"bytes that the database may take; 0: any"`
	DiskPath      string  `koanf:"disk_path" help:"a path on the database's disk, on its machine; empty: not known"`
	At            float64 `koanf:"at" help:"share of either that refuses pushes, until it is 0.03 lower"`
	QueueEntries  int64   `koanf:"queue_entries_max" help:"capacity of queues without one of their own; 0: none"`
}

func (b Brake) config() maintenance.BrakeConfig {
	c := maintenance.BrakeConfig{DatabaseBytesMax: b.DatabaseBytes, At: b.At, QueueEntriesMax: b.QueueEntries}
	if b.DiskPath != "" {
		c.Disk = func() (float64, error) { return diskShare(b.DiskPath) }
	}
	return c
}

// diskShare returns the share, 0 to 1, of the disk of a path that others than its superuser cannot use any more.
func diskShare(path string) (float64, error) {
	usage, err := disk.Usage(path)
	if err != nil {
		return 0, fmt.Errorf("leader.brake.disk_path: %w", err)
	}
	return usage.UsedPercent / 100, nil
}
