//! Recognises what a device already holds, from its first and last bytes, so that `create` overwrites nothing
//! of value. It errs on the side of recognising: a false alarm costs a `--force`, a missed format costs
//! somebody's data.
//!
//! Magic numbers are those of the formats' own documents. Pure: the caller reads the bytes.

use super::{COPY_BYTES, FormatError, MAGIC, Superblock, all_copy_offsets};
use crate::units::ByteOffset;
use std::fmt;

/// Bytes to read at each end of a device. At the head, the marks of ISO 9660, UDF, reiserfs, JFS and btrfs
/// lie deepest; two of the ZFS labels lie within 512 KiB of the (rounded) end.
pub const SIGNATURE_WINDOW: u64 = 1 << 20;

/// A format that was recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Its name ("ext4", "Calpe member of 'tank'").
    pub name: String,
    /// Where its mark was found.
    pub offset: ByteOffset,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.name, self.offset)
    }
}

/// All formats recognised on a device of `device_bytes`, in order of offset. `head` holds its first bytes and
/// `tail` its last, [`SIGNATURE_WINDOW`] of each if the device is that large; they may overlap.
///
/// # Panics
/// When either is longer than the device.
#[must_use]
pub fn recognise(head: &[u8], tail: &[u8], device_bytes: u64) -> Vec<Signature> {
    let tail_start = device_bytes.checked_sub(tail.len() as u64).expect("tail within the device");
    assert!(head.len() as u64 <= device_bytes, "head within the device");
    let device = Ends { head, tail, tail_start, bytes: device_bytes };
    let mut found = Vec::new();
    for &(name, at, magic) in MAGICS {
        if device.has(at, magic) {
            found.push(signature(name, at));
        }
    }
    for probe in PROBES {
        probe(&device, &mut found);
    }
    found.sort_by_key(|signature| signature.offset);
    found.dedup();
    found
}

/// Marks that are a fixed string at a fixed place.
const MAGICS: &[(&str, u64, &[u8])] = &[
    ("XFS", 0, b"XFSB"),
    ("XFS log", 0, b"\xfe\xed\xba\xbe"),
    ("NTFS", 3, b"NTFS    "),
    ("exFAT", 3, b"EXFAT   "),
    ("BitLocker", 3, b"-FVE-FS-"),
    ("squashfs", 0, b"hsqs"),
    ("qcow2 image", 0, b"QFI\xfb"),
    ("VMDK image", 0, b"KDMV"),
    ("VHDX image", 0, b"vhdxfile"),
    ("VDI image", 0x40, b"\x7f\x10\xda\xbe"),
    ("VDO", 0, b"dmvdo001"),
    ("LUKS1", 0, b"LUKS\xba\xbe\x00\x01"),
    ("LUKS2", 0, b"LUKS\xba\xbe\x00\x02"),
    ("dm-integrity", 0, b"integrt\0"),
    ("dm-verity", 0, b"verity\0\0"),
    ("Ceph BlueStore", 0, b"bluestore block device"),
    ("bcache", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("bcachefs", 4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("F2FS", 1024, b"\x10\x20\xf5\xf2"),
    ("EROFS", 1024, b"\xe2\xe1\xf5\xe0"),
    ("HFS+", 1024, b"H+\0\x04"),
    ("HFSX", 1024, b"HX\0\x05"),
    ("NILFS2", 1024 + 6, b"\x34\x34"),
    ("JFS", 32768, b"JFS1"),
    ("ISO 9660", 32768 + 1, b"CD001"),
    ("UDF", 32768 + 1, b"BEA01"),
    ("UDF", 32768 + 2048 + 1, b"NSR0"),
    ("reiserfs", 65536 + 52, b"ReIsEr"),
    ("GFS2", 65536, b"\x01\x16\x19\x70"),
    ("btrfs", 65536 + 64, b"_BHRfS_M"),
    ("APFS", 32, b"NXSB"),
    ("Stratis", 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("Stratis", 4608 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
];

/// Formats whose mark needs a computation to find or check.
const PROBES: &[fn(&Ends<'_>, &mut Vec<Signature>)] = &[
    calpe,
    ext,
    fat,
    swap,
    luks2_second_header,
    lvm2,
    ocfs2,
    md_at_end,
    md_near_start,
    firmware_raid,
    zfs,
    gpt,
    mbr,
];

/// The two ends of a device, addressed by absolute offset.
struct Ends<'a> {
    head: &'a [u8],
    tail: &'a [u8],
    tail_start: u64,
    bytes: u64,
}

impl<'a> Ends<'a> {
    /// Bytes at an absolute offset, if one of the ends has all of them.
    fn at(&self, offset: u64, len: usize) -> Option<&'a [u8]> {
        let slice = |part: &'a [u8], start: u64| {
            let from = usize::try_from(offset.checked_sub(start)?).ok()?;
            part.get(from..from.checked_add(len)?)
        };
        slice(self.head, 0).or_else(|| slice(self.tail, self.tail_start))
    }

    fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.at(offset, magic.len()) == Some(magic)
    }

    /// A little-endian number; zero if the ends lack any of its bytes.
    fn le(&self, offset: u64, len: usize) -> u64 {
        let bytes = self.at(offset, len).unwrap_or(&[]);
        bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
}

fn signature(name: impl Into<String>, at: u64) -> Signature {
    Signature { name: name.into(), offset: ByteOffset(at) }
}

fn calpe(device: &Ends<'_>, found: &mut Vec<Signature>) {
    for offset in all_copy_offsets(device.bytes).map(|offset| offset.0) {
        if !device.has(offset, &MAGIC) {
            continue;
        }
        let copy = device.at(offset, COPY_BYTES).map(Superblock::decode);
        let name = match copy {
            Some(Ok(copy)) => format!("Calpe member {} of '{}' ({})", copy.member, copy.name, copy.array),
            Some(Err(FormatError::NoRedoLog { name, .. })) => {
                format!("Calpe member of '{name}', an array without redo log of an earlier build")
            }
            _ => "Calpe member (damaged or newer superblock)".to_owned(),
        };
        found.push(signature(name, offset));
    }
}

fn ext(device: &Ends<'_>, found: &mut Vec<Signature>) {
    const SUPERBLOCK: u64 = 1024;
    if !device.has(SUPERBLOCK + 56, b"\x53\xef") {
        return;
    }
    let (compat, incompat) = (device.le(SUPERBLOCK + 92, 4), device.le(SUPERBLOCK + 96, 4));
    let ro_compat = device.le(SUPERBLOCK + 100, 4);
    const JOURNAL: u64 = 0x4;
    const JOURNAL_DEVICE: u64 = 0x8;
    // The masks hold the features that ext3 has: filetype, recover, meta_bg; sparse_super, large_file,
    // btree_dir.
    let beyond_ext3 = incompat & !0x16 != 0 || ro_compat & !0x7 != 0;
    let name = match () {
        () if incompat & JOURNAL_DEVICE != 0 => "ext journal",
        () if beyond_ext3 => "ext4",
        () if compat & JOURNAL != 0 => "ext3",
        () => "ext2",
    };
    found.push(signature(name, SUPERBLOCK + 56));
}

fn fat(device: &Ends<'_>, found: &mut Vec<Signature>) {
    let named = device.has(54, b"FAT1") || device.has(54, b"FAT   ") || device.has(82, b"FAT32");
    let jump = device.has(0, b"\xe9") || (device.has(0, b"\xeb") && device.has(2, b"\x90"));
    let (sector, cluster) = (device.le(11, 2), device.le(13, 1));
    let plausible = jump
        && matches!(sector, 512 | 1024 | 2048 | 4096)
        && cluster.is_power_of_two()
        && device.le(14, 2) != 0
        && matches!(device.le(16, 1), 1 | 2)
        && device.le(21, 1) >= 0xf0
        && device.has(510, b"\x55\xaa");
    if named || plausible {
        found.push(signature("FAT", if named && device.has(82, b"FAT32") { 82 } else { 0 }));
    }
}

fn swap(device: &Ends<'_>, found: &mut Vec<Signature>) {
    for page in [4096, 8192, 16384, 32768, 65536] {
        let at = page - 10;
        if device.has(at, b"SWAPSPACE2") || device.has(at, b"SWAP-SPACE") {
            found.push(signature("swap", at));
        }
        if [b"S1SUSPEND".as_slice(), b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001"]
            .iter()
            .any(|magic| device.has(at, magic))
        {
            found.push(signature("suspended system image in swap", at));
        }
    }
}

fn luks2_second_header(device: &Ends<'_>, found: &mut Vec<Signature>) {
    // The second header follows the first, whose length is a power of two from 16 KiB to 4 MiB.
    for at in (14..=22).map(|shift| 1u64 << shift) {
        if device.has(at, b"SKUL\xba\xbe\x00\x02") {
            found.push(signature("LUKS2 second header", at));
        }
    }
}

fn lvm2(device: &Ends<'_>, found: &mut Vec<Signature>) {
    for at in [0, 512, 1024, 1536] {
        if device.has(at, b"LABELONE") && device.has(at + 24, b"LVM2 001") {
            found.push(signature("LVM2 physical volume", at));
        }
    }
}

fn ocfs2(device: &Ends<'_>, found: &mut Vec<Signature>) {
    for at in [1024, 2048, 4096, 8192] {
        if device.has(at, b"OCFSV2") {
            found.push(signature("OCFS2", at));
        }
    }
}

const MD_MAGIC: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
const MD_MAGIC_SWAPPED: [u8; 4] = 0xa92b_4efc_u32.to_be_bytes();

fn md_at_end(device: &Ends<'_>, found: &mut Vec<Signature>) {
    // 0.90: in the last whole 64 KiB, in the byte order of its host. 1.0: 8 KiB before the end, rounded down
    // to 4 KiB.
    let old = (device.bytes & !0xffff).checked_sub(0x10000);
    if let Some(at) = old.filter(|&at| device.has(at, &MD_MAGIC) || device.has(at, &MD_MAGIC_SWAPPED)) {
        found.push(signature("Linux md member (0.90)", at));
    }
    let sectors = device.bytes / 512;
    let end = sectors.checked_sub(16).map(|sector| (sector & !7) * 512);
    if let Some(at) = end.filter(|&at| device.has(at, &MD_MAGIC) && device.le(at + 4, 4) == 1) {
        found.push(signature("Linux md member (1.0)", at));
    }
}

fn md_near_start(device: &Ends<'_>, found: &mut Vec<Signature>) {
    for (name, at) in [("Linux md member (1.1)", 0), ("Linux md member (1.2)", 4096)] {
        if device.has(at, &MD_MAGIC) && device.le(at + 4, 4) == 1 {
            found.push(signature(name, at));
        }
    }
}

fn firmware_raid(device: &Ends<'_>, found: &mut Vec<Signature>) {
    if let Some(at) = device.bytes.checked_sub(1024)
        && device.has(at, b"Intel Raid ISM Cfg Sig. ")
    {
        found.push(signature("Intel firmware RAID member", at));
    }
    if let Some(at) = device.bytes.checked_sub(512)
        && device.has(at, b"\xde\x11\xde\x11")
    {
        found.push(signature("DDF firmware RAID member", at));
    }
}

/// ZFS writes four labels of 256 KiB, two at each end; their second half is a ring of uberblocks.
fn zfs(device: &Ends<'_>, found: &mut Vec<Signature>) {
    const LABEL: u64 = 256 << 10;
    const RING: u64 = 128 << 10;
    const UBERBLOCK_STEP: u64 = 1024;
    const MAGIC: u64 = 0x00ba_b10c;
    let end = device.bytes & !(LABEL - 1);
    let labels = [Some(0), Some(LABEL), end.checked_sub(2 * LABEL), end.checked_sub(LABEL)];
    for label in labels.into_iter().flatten() {
        let uberblock = (RING..LABEL)
            .step_by(UBERBLOCK_STEP as usize)
            .map(|at| label + at)
            .find(|&at| device.has(at, &MAGIC.to_le_bytes()) || device.has(at, &MAGIC.to_be_bytes()));
        found.extend(uberblock.map(|at| signature("ZFS label", at)));
    }
}

fn gpt(device: &Ends<'_>, found: &mut Vec<Signature>) {
    for sector in [512, 4096] {
        if device.has(sector, b"EFI PART") {
            found.push(signature("GPT partition table", sector));
        }
        if let Some(at) = (device.bytes / sector * sector).checked_sub(sector)
            && device.has(at, b"EFI PART")
        {
            found.push(signature("GPT partition table (backup)", at));
        }
    }
}

/// An MBR ends in 55 AA, as many boot sectors do; it holds a partition table if its four entries are well
/// formed and at least one is in use.
fn mbr(device: &Ends<'_>, found: &mut Vec<Signature>) {
    const TABLE: u64 = 446;
    if !device.has(510, b"\x55\xaa") {
        return;
    }
    let entries: Vec<_> = (0..4).map(|i| TABLE + 16 * i).collect();
    let well_formed = |&at: &u64| matches!(device.le(at, 1), 0 | 0x80);
    let in_use = |&at: &u64| device.le(at + 4, 1) != 0 && device.le(at + 12, 4) != 0;
    if entries.iter().all(well_formed) && entries.iter().any(in_use) {
        found.push(signature("MBR partition table", 510));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Role;
    use super::super::superblock_bytes::tests::example;
    use super::*;

    const DEVICE: u64 = 5 << 20 | 0x3000;

    fn recognised(device: &[u8]) -> Vec<(String, u64)> {
        let window = (SIGNATURE_WINDOW as usize).min(device.len());
        let found = recognise(&device[..window], &device[device.len() - window..], device.len() as u64);
        found.into_iter().map(|signature| (signature.name, signature.offset.0)).collect()
    }

    fn with(marks: &[(u64, &[u8])]) -> Vec<u8> {
        let mut device = vec![0; DEVICE as usize];
        for (at, bytes) in marks {
            device[*at as usize..*at as usize + bytes.len()].copy_from_slice(bytes);
        }
        device
    }

    #[test]
    fn blank_and_random_looking_devices_hold_nothing() {
        assert_eq!(recognised(&[]), []);
        assert_eq!(recognised(&[0; 100]), []);
        assert_eq!(recognised(&with(&[])), []);
        let mut noise = vec![0; DEVICE as usize];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        assert_eq!(recognised(&noise), []);
    }

    #[test]
    fn every_fixed_mark_is_recognised_where_it_lies() {
        for (name, at, magic) in MAGICS {
            let found = recognised(&with(&[(*at, magic)]));
            assert!(found.contains(&((*name).to_owned(), *at)), "{name}: {found:?}");
        }
    }

    #[test]
    fn every_fixed_mark_is_recognised_on_a_device_that_ends_with_it() {
        for (name, at, magic) in MAGICS {
            let mut device = with(&[(*at, magic)]);
            device.truncate(*at as usize + magic.len());
            assert!(recognised(&device).iter().any(|(found, _)| found == name), "{name}");
            device.pop();
            assert!(
                !recognised(&device).contains(&((*name).to_owned(), *at)),
                "{name} without its last byte"
            );
        }
    }

    #[test]
    fn ext_generations_are_told_apart() {
        let device = |compat: u8, incompat: u8, ro_compat: u8| {
            recognised(&with(&[
                (1024 + 56, b"\x53\xef"),
                (1024 + 92, &[compat]),
                (1024 + 96, &[incompat]),
                (1024 + 100, &[ro_compat]),
            ]))
        };
        assert_eq!(device(0, 2, 3), [("ext2".into(), 1080)]);
        assert_eq!(device(4, 6, 3), [("ext3".into(), 1080)]);
        assert_eq!(device(4, 0x42, 3), [("ext4".into(), 1080)]);
        assert_eq!(device(4, 2, 0x7b), [("ext4".into(), 1080)]);
        assert_eq!(device(0, 8, 0), [("ext journal".into(), 1080)]);
    }

    #[test]
    fn computed_places_are_found() {
        let md10 = ((DEVICE / 512 - 16) & !7) * 512;
        let md090 = (DEVICE & !0xffff) - 0x10000;
        let zfs_end = DEVICE & !0x3ffff;
        let md: &[u8] = b"\xfc\x4e\x2b\xa9\x01\0\0\0";
        let uberblock: &[u8] = &0x00ba_b10c_u64.to_le_bytes();
        type Case<'a> = (&'a str, u64, Vec<(u64, &'a [u8])>);
        let cases: Vec<Case<'_>> = vec![
            ("swap", 4086, vec![(4086, b"SWAPSPACE2")]),
            ("swap", 65526, vec![(65526, b"SWAPSPACE2")]),
            ("suspended system image in swap", 4086, vec![(4086, b"S1SUSPEND")]),
            ("LUKS2 second header", 16384, vec![(16384, b"SKUL\xba\xbe\x00\x02")]),
            ("LVM2 physical volume", 512, vec![(512, b"LABELONE"), (536, b"LVM2 001")]),
            ("OCFS2", 4096, vec![(4096, b"OCFSV2")]),
            ("Linux md member (1.1)", 0, vec![(0, md)]),
            ("Linux md member (1.2)", 4096, vec![(4096, md)]),
            ("Linux md member (1.0)", md10, vec![(md10, md)]),
            ("Linux md member (0.90)", md090, vec![(md090, b"\xfc\x4e\x2b\xa9")]),
            ("Linux md member (0.90)", md090, vec![(md090, b"\xa9\x2b\x4e\xfc")]),
            ("ZFS label", 128 << 10, vec![(128 << 10, uberblock)]),
            ("ZFS label", (384 << 10) + 5120, vec![((384 << 10) + 5120, uberblock)]),
            ("ZFS label", zfs_end - (128 << 10), vec![(zfs_end - (128 << 10), uberblock)]),
            ("ZFS label", zfs_end - (384 << 10), vec![(zfs_end - (384 << 10), b"\0\0\0\0\x00\xba\xb1\x0c")]),
            (
                "Intel firmware RAID member",
                DEVICE - 1024,
                vec![(DEVICE - 1024, b"Intel Raid ISM Cfg Sig. 1.3")],
            ),
            ("DDF firmware RAID member", DEVICE - 512, vec![(DEVICE - 512, b"\xde\x11\xde\x11")]),
            ("GPT partition table", 512, vec![(512, b"EFI PART")]),
            ("GPT partition table", 4096, vec![(4096, b"EFI PART")]),
            ("GPT partition table (backup)", DEVICE - 512, vec![(DEVICE - 512, b"EFI PART")]),
            ("GPT partition table (backup)", DEVICE - 4096, vec![(DEVICE - 4096, b"EFI PART")]),
        ];
        for (name, at, marks) in cases {
            assert_eq!(recognised(&with(&marks)), [(name.to_owned(), at)]);
        }
    }

    #[test]
    fn fat_is_known_by_name_or_by_its_parameters() {
        assert_eq!(recognised(&with(&[(82, b"FAT32   ")])), [("FAT".into(), 82)]);
        assert_eq!(recognised(&with(&[(54, b"FAT16   ")])), [("FAT".into(), 0)]);
        let unnamed: &[(u64, &[u8])] =
            &[(0, b"\xeb\x3c\x90"), (11, b"\x00\x02\x04\x01\x00\x02"), (21, b"\xf8"), (510, b"\x55\xaa")];
        assert_eq!(recognised(&with(unnamed)), [("FAT".into(), 0)]);
        assert_eq!(recognised(&with(&unnamed[..3])), []);
    }

    #[test]
    fn a_partition_table_needs_a_used_and_no_malformed_entry() {
        let entry: &[u8] = b"\x80\0\0\0\x83\0\0\0\0\x08\0\0\0\x10\0\0";
        let end: (u64, &[u8]) = (510, b"\x55\xaa");
        assert_eq!(recognised(&with(&[(446, entry), end])), [("MBR partition table".into(), 510)]);
        assert_eq!(recognised(&with(&[end])), []);
        assert_eq!(recognised(&with(&[(446, entry), (462, b"\x17"), end])), []);
    }

    #[test]
    fn calpe_members_are_named_even_when_damaged_and_at_one_end_only() {
        let copy = example(Role::Member).encode();
        let tail = all_copy_offsets(DEVICE)[2].0;
        let name = "Calpe member 2 of 'tank' (01234567-89ab-4def-8000-0000000003e8)".to_owned();
        let found = recognised(&with(&[(tail, copy.as_slice())]));
        assert_eq!(found, [(name.clone(), tail)]);
        let found = recognised(&with(&[(0, copy.as_slice()), (16384, &copy[..8])]));
        assert_eq!(found, [(name, 0), ("Calpe member (damaged or newer superblock)".into(), 16384)]);
    }

    #[test]
    fn several_things_on_one_device_are_all_told() {
        let found = recognised(&with(&[(512, b"EFI PART"), (65536 + 64, b"_BHRfS_M"), (0, b"XFSB")]));
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["XFS", "GPT partition table", "btrfs"]);
    }
}
