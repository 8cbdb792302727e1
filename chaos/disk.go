package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// smallDisk is a file system of its own for the database, which can be filled up. The file behind it
// is on the machine's disk, so that fsync means what it means there.
type smallDisk struct {
	dir, image string
}

// diskSize holds the database of a run of hours with its WAL.
const diskSize = 2 << 30

// mountSmallDisk makes an ext4 file system in a file, or where that cannot be mounted one in memory.
func mountSmallDisk(ctx context.Context) (*smallDisk, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("only root can mount a small disk")
	}
	// Short: the path of the server's socket is below it.
	dir, err := os.MkdirTemp("", "pd-")
	if err != nil {
		return nil, err
	}
	d := &smallDisk{dir: dir, image: dir + ".img"}
	err = errors.Join(os.WriteFile(d.image, nil, 0o600), os.Truncate(d.image, diskSize))
	if err == nil {
		err = command(ctx, "mkfs.ext4", "-q", "-m", "0", d.image)
	}
	if err == nil {
		err = command(ctx, "mount", "-o", "loop", d.image, dir)
	}
	if err != nil {
		inMemory := command(ctx, "mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%d", diskSize), "penstock-chaos", dir)
		if inMemory != nil {
			d.unmount()
			return nil, errors.Join(err, inMemory)
		}
	}
	// The server runs as another user.
	return d, os.Chmod(dir, 0o1777) //nolint:gosec // a directory like /tmp
}

func command(ctx context.Context, name string, args ...string) error {
	if text, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(text))
	}
	return nil
}

// inEnvironment lets temporary directories be made on the disk until the returned function is called.
func (d *smallDisk) inEnvironment() (leave func()) {
	before, set := os.LookupEnv("TMPDIR")
	os.Setenv("TMPDIR", d.dir)
	return func() {
		os.Unsetenv("TMPDIR")
		if set {
			os.Setenv("TMPDIR", before)
		}
	}
}

func (d *smallDisk) filler() string { return filepath.Join(d.dir, "filler") }

// fill leaves no space: it writes until the file system refuses.
func (d *smallDisk) fill() error {
	f, err := os.Create(d.filler())
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 8 << 20; size >= 4096; size /= 16 {
		block := bytes.NewReader(make([]byte, size))
		for err = nil; err == nil; {
			_, _ = block.Seek(0, io.SeekStart)
			_, err = block.WriteTo(f)
		}
	}
	return f.Sync()
}

func (d *smallDisk) free() { _ = os.Remove(d.filler()) }

func (d *smallDisk) unmount() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for ctx.Err() == nil && command(ctx, "umount", d.dir) != nil {
		time.Sleep(100 * time.Millisecond)
	}
	_ = os.Remove(d.image)
	_ = os.Remove(d.dir)
}
