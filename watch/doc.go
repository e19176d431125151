// Package watch tells whether the work is being done. It compares, from outside the workers, what the log asks for
// with what the cursors have passed: by the log's own seq and occurred_at, in one statement, so that head and cursors
// are of the same moment. It needs no runner and no worker; it reads and writes nothing.
//
// It measures progress and not presence: a process that is alive and does nothing is a problem, one that is gone
// while there is nothing to do is none. Nothing ages out: a stall is a problem for as long as it lasts. What cannot be
// read is unknown, and unknown is never ok.
//
// It does not see what handlers do outside the database, nor whether they do the right thing; [Coverage] says from
// when on the log still holds evidence, and what was not looked at.
package watch
